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
	c    *command
	sent [2]uint64
	held []byte        // of the beginning, not yet sent
	gone chan struct{} // closed when the host's side of the connection ended
}

// stream runs a session from these offsets, which acknowledge all before them.
func (c *command) stream(r *request, offsets [2]uint64) {
	r.demandUpgrade(framesProtocol)
	s := &session{link: r.link, c: c, sent: offsets, gone: make(chan struct{})}
	accepted, _ := c.stdin.offsets()
	started := encodeFrame(frameStarted, 0, fmt.Appendf(nil, `{"pid":%d,"stdin":%d}`, c.pid, accepted))
	gaps := s.begin(offsets)
	defer s.leave()
	s.held = slices.Concat(r.upgradeHead(), started, gaps)
	go s.listen()
	err := attempt(func() { s.run(accepted) })
	s.CloseWrite() // the host may still be sending acknowledgements: a close would reset the connection
	s.SetReadDeadline(now().Add(keepaliveTime))
	<-s.gone
	check(err)
}

// begin takes the command over, and gives the frames that tell of gaps.
func (s *session) begin(offsets [2]uint64) (gaps []byte) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for i, out := range s.c.out {
		if offsets[i] > out.written {
			check(invalid("%s has no offset %d: it ends at %d", out.name, offsets[i], out.written))
		}
		if offsets[i] < out.acked {
			gap := fmt.Appendf(nil, `{"stream":"%s","from":%d,"to":%d}`, out.name, offsets[i], out.acked)
			gaps = append(gaps, encodeFrame(frameGap, offsets[i], gap)...)
			s.sent[i] = out.acked
		}
	}
	for i, out := range s.c.out {
		out.acknowledge(offsets[i])
	}
	if s.c.session != nil {
		cut(s.c.session.TCPConn)
	}
	s.c.session = s
	s.c.holders++
	return gaps
}

func (s *session) leave() {
	s.c.mu.Lock()
	if s.c.session == s {
		s.c.session = nil
	}
	s.c.mu.Unlock()
	poke(s.c.wake) // what this session took may have been meant for a newer one
	s.c.release()
}

func (s *session) run(stdinTold uint64) {
	for turn := 0; ; turn++ {
		out, data, offset, ended := s.next(turn)
		_, written := s.c.stdin.offsets()
		switch {
		case data != nil:
			s.put(frameHeader(out.kind, len(data), offset), data)
		case written > stdinTold:
			stdinTold = written
			s.put(encodeFrame(frameAck, 0, fmt.Appendf(nil, `{"stdin":%d}`, written)))
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
		parts = append([][]byte{s.held}, parts...)
		s.held = nil
	}
	s.send(parts...)
}

// next finds unsent output, of each stream in turn; ended is true when there is none and none will come.
func (s *session) next(turn int) (out *stream, data []byte, offset uint64, ended bool) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for i := range s.c.out {
		which := (turn + i) % len(s.c.out)
		out = s.c.out[which]
		if offset = s.sent[which]; offset < out.written {
			data = out.unsent(offset)
			s.sent[which] += uint64(len(data))
			return out, data, offset, false
		}
	}
	return nil, nil, 0, s.c.hasEnded() && s.c.session == s
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
		s.c.stdin.put(f.offset, f.payload)
	case frameStdinEnd:
		s.c.stdin.finish()
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
		if body.Signal < 1 || body.Signal > 64 {
			check(errFrame)
		}
		go func() { warn(s.c.kill(cause{syscall.Signal(body.Signal), "killed", body.Reason})) }()
	}
}
