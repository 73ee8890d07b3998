package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"syscall"
	"time"
)

const (
	keepaliveTime = 5 * time.Second
	heldTime      = 4 * time.Millisecond // a program that ends within it is told in one packet
)

// session streams one command over one upgraded connection. A newer session of the same command ends an older one.
type session struct {
	link
	c         *command
	sent      [2]uint64     // offsets of its output; those before the first are acknowledged
	stdinTold uint64        // offset that was acknowledged to the host
	held      []byte        // of the beginning, not yet sent
	gone      chan struct{} // closed when the host's side of the connection ended
}

// stream runs a session from these offsets.
func (c *command) stream(r *request, offsets [2]uint64) {
	r.demandUpgrade(framesProtocol)
	s := &session{link: r.link, c: c, sent: offsets, gone: make(chan struct{})}
	opening := s.begin()
	defer s.leave()
	s.held = append(r.upgradeHead(), opening...)
	go s.listen()
	err := attempt(s.run)
	s.CloseWrite() // the host may still be sending acknowledgements: a close would reset the connection
	s.SetReadDeadline(now().Add(keepaliveTime))
	<-s.gone
	check(err)
}

// begin takes the command over, and gives the first frames.
func (s *session) begin() []byte {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	frames := encodeFrame(frameStarted, 0, fmt.Appendf(nil, `{"pid":%d,"stdin":%d}`, c.pid, c.stdin.accepted))
	for i, out := range c.out {
		from := s.sent[i]
		demand(from <= out.written, invalid("%s has no offset %d: it ends at %d", out.name, from, out.written))
		if from < out.acked {
			gap := fmt.Appendf(nil, `{"stream":"%s","from":%d,"to":%d}`, out.name, from, out.acked)
			frames = append(frames, encodeFrame(frameGap, from, gap)...)
			s.sent[i] = out.acked
		}
	}
	for i, out := range c.out {
		out.acknowledge(s.sent[i])
	}
	if c.session != nil {
		cut(c.session.TCPConn)
	}
	c.session, s.stdinTold = s, c.stdin.accepted
	c.holders++
	return frames
}

func (s *session) leave() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.c.session == s {
		s.c.session = nil
	}
	poke(s.c.wake) // what this session took may have been meant for a newer one
	s.c.release()
}

func (s *session) run() {
	for turn := 0; ; turn++ {
		frame, ended := s.next(turn)
		switch {
		case frame != nil:
			s.put(frame...)
		case ended:
			s.put(encodeFrame(frameEnded, 0, got(json.Marshal(s.c.record()))))
			return
		default:
			patience := keepaliveTime
			if s.held != nil {
				patience = heldTime
			}
			select {
			case <-s.c.wake:
			case <-s.gone:
				return
			case <-time.After(patience):
				if s.held == nil {
					s.held = frameHeader(frameKeepalive, 0, 0)
				}
				s.put()
			}
		}
	}
}

// put sends what was held back, and these parts behind it.
func (s *session) put(parts ...[]byte) {
	if s.held != nil {
		parts = slices.Insert(parts, 0, s.held)
		s.held = nil
	}
	s.send(parts...)
}

// next gives the frame that is due: output, of each stream in turn, then how far stdin has come. ended says that none is
// and none will be.
func (s *session) next(turn int) (frame [][]byte, ended bool) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.out {
		which := (turn + i) % len(c.out)
		if out, offset := c.out[which], s.sent[which]; offset < out.written {
			data := out.unsent(offset)
			s.sent[which] += uint64(len(data))
			return [][]byte{frameHeader(out.kind, len(data), offset), data}, false
		}
	}
	if c.stdin.written > s.stdinTold {
		s.stdinTold = c.stdin.written
		return [][]byte{encodeFrame(frameAck, 0, fmt.Appendf(nil, `{"stdin":%d}`, s.stdinTold))}, false
	}
	return nil, c.hasEnded() && c.session == s
}

// listen takes the host's frames until its side of the connection ends.
func (s *session) listen() {
	defer close(s.gone)
	defer s.Close()
	buffer := make([]byte, 4096)
	attempt(func() {
		for {
			s.take(got(readFrame(s.in, buffer)))
		}
	})
}

func (s *session) take(f frame) {
	var body struct {
		Stdout, Stderr uint64
		Cols, Rows     uint16
		Signal         int
		Reason         string
	}
	if f.kind != frameStdin && f.kind != frameStdinEnd {
		check(json.Unmarshal(f.payload, &body))
	}
	switch f.kind {
	case frameStdin:
		s.c.takeStdin(f.offset, f.payload, false)
	case frameStdinEnd:
		s.c.takeStdin(0, nil, true)
	case frameAck:
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		for i, out := range s.c.out {
			out.acknowledge(min([...]uint64{body.Stdout, body.Stderr}[i], s.sent[i]))
		}
	case frameResize:
		if s.c.stdin.pty {
			resizePty(s.c.stdin.file, windowSize{body.Cols, body.Rows})
		}
	case frameKill:
		demand(body.Signal >= 1 && body.Signal <= 64, errFrame)
		go s.c.kill(cause{syscall.Signal(body.Signal), "killed", body.Reason})
	}
}
