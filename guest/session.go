package main

import (
	"encoding/json"
	"syscall"
	"time"
)

const (
	keepaliveTime = 5 * time.Second
	heldTime      = 4 * time.Millisecond // a program that ends within it is told in one packet
)

// session streams one command over one upgraded connection. A newer session of the same command ends an older one.
type session struct {
	r    *request
	c    *command
	sent [2]uint64
	held []byte        // of the beginning, not yet sent
	gone chan struct{} // closed when the host's side of the connection ended
}

func (r *request) upgradeToFrames() error {
	return r.send(r.framesHead())
}

func (r *request) framesHead() []byte {
	r.answered, r.keepAlive = true, false
	r.tcp.SetReadDeadline(never)
	return []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + framesProtocol + "\r\n\r\n")
}

func (r *request) sendFrame(kind byte, offset uint64, body any) error {
	var payload []byte
	if body != nil {
		payload, _ = json.Marshal(body)
	}
	return r.send(encodeFrame(kind, offset, payload))
}

// stream runs a session from these offsets, which acknowledge all before them.
func (c *command) stream(r *request, offsets [2]uint64) error {
	c.mu.Lock()
	for i, s := range c.streams() {
		if offsets[i] > s.written {
			c.mu.Unlock()
			return invalid("%s has no offset %d: it ends at %d", s.name, offsets[i], s.written)
		}
	}
	s := &session{r: r, c: c, sent: offsets, gone: make(chan struct{})}
	if c.session != nil {
		c.session.r.tcp.Close()
	}
	c.session = s
	c.holders++
	pid := c.pid
	gaps := map[string][2]uint64{}
	for i, out := range c.streams() {
		if offsets[i] < out.acked {
			gaps[out.name], s.sent[i] = [2]uint64{offsets[i], out.acked}, out.acked
		}
		out.acknowledge(offsets[i])
	}
	c.mu.Unlock()
	defer s.leave()
	accepted, _ := c.stdin.offsets()
	payload, _ := json.Marshal(map[string]any{"pid": pid, "stdin": accepted})
	s.held = append(r.framesHead(), encodeFrame(frameStarted, 0, payload)...)
	for name, gap := range gaps {
		payload, _ := json.Marshal(map[string]any{"stream": name, "from": gap[0], "to": gap[1]})
		s.held = append(s.held, encodeFrame(frameGap, gap[0], payload)...)
	}
	go s.listen()
	err := s.run(accepted)
	r.tcp.CloseWrite() // the host may still be sending acknowledgements: a close would reset the connection
	r.tcp.SetReadDeadline(now().Add(keepaliveTime))
	<-s.gone
	return err
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

func (s *session) run(stdinTold uint64) error {
	silence := time.NewTimer(keepaliveTime)
	defer silence.Stop()
	head := make([]byte, frameHeaderBytes)
	for turn := 0; ; turn++ {
		out, data, offset, ended := s.next(turn)
		if data != nil {
			putFrameHeader(head, out.kind, len(data), offset)
			if err := s.send(head, data); err != nil {
				return err
			}
			continue
		}
		if _, written := s.c.stdin.offsets(); written > stdinTold {
			stdinTold = written
			if err := s.sendFrame(frameAck, map[string]any{"stdin": written}); err != nil {
				return err
			}
			continue
		}
		if ended {
			return s.sendFrame(frameEnded, s.c.record())
		}
		if s.held != nil {
			silence.Reset(heldTime)
		} else {
			silence.Reset(keepaliveTime)
		}
		select {
		case <-s.c.wake:
		case <-s.gone:
			return nil
		case <-silence.C:
			if s.held == nil {
				s.held = encodeFrame(frameKeepalive, 0, nil)
			}
			if err := s.send(); err != nil {
				return err
			}
		}
	}
}

// send sends what was held back, and these parts behind it.
func (s *session) send(parts ...[]byte) error {
	if s.held != nil {
		parts = append([][]byte{s.held}, parts...)
		s.held = nil
	}
	return s.r.send(parts...)
}

func (s *session) sendFrame(kind byte, body any) error {
	payload, _ := json.Marshal(body)
	return s.send(encodeFrame(kind, 0, payload))
}

// next finds unsent output, of each stream in turn; ended is true when there is none and none will come.
func (s *session) next(turn int) (out *stream, data []byte, offset uint64, ended bool) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	streams := s.c.streams()
	for i := range streams {
		which := (turn + i) % len(streams)
		out = streams[which]
		if offset = s.sent[which]; offset < out.written {
			data = out.unsent(offset)
			s.sent[which] += uint64(len(data))
			return out, data, offset, false
		}
	}
	return nil, nil, 0, s.c.ended && s.c.session == s
}

// listen takes the host's frames until its side of the connection ends.
func (s *session) listen() {
	defer close(s.gone)
	buffer := make([]byte, 4096)
	for {
		f, err := readFrame(s.r.in, buffer)
		if err == nil {
			err = s.take(f)
		}
		if err != nil {
			s.r.tcp.Close()
			return
		}
	}
}

func (s *session) take(f frame) error {
	var body struct {
		Stdout, Stderr uint64
		Cols, Rows     uint16
		Signal         int
		Reason         string
	}
	switch f.kind {
	case frameStdin:
		return s.c.stdin.put(f.offset, f.payload)
	case frameStdinEnd:
		s.c.stdin.finish()
		return nil
	}
	if err := json.Unmarshal(f.payload, &body); err != nil {
		return errFrame
	}
	switch f.kind {
	case frameAck:
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		for i, out := range s.c.streams() {
			out.acknowledge(min([...]uint64{body.Stdout, body.Stderr}[i], s.sent[i]))
		}
	case frameResize:
		return s.c.resize(body.Cols, body.Rows)
	case frameKill:
		if body.Signal < 1 || body.Signal > 64 {
			return errFrame
		}
		go s.c.kill(cause{syscall.Signal(body.Signal), "killed", body.Reason})
	}
	return nil
}
