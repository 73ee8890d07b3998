package main

import (
	"encoding/binary"
	"errors"
	"io"
)

// The frame format of api/guest.md; api/frames.json holds golden frames for this and every other implementation.
const (
	frameStdout    = 1
	frameStderr    = 2
	frameStarted   = 3
	frameEnded     = 4
	frameGap       = 5
	frameKeepalive = 6
	frameEvent     = 7
	frameError     = 8
	frameStdin     = 16
	frameStdinEnd  = 17
	frameAck       = 18
	frameResize    = 19
	frameKill      = 20

	frameHeaderBytes = 16
	maxFramePayload  = 1 << 20
)

type frame struct {
	kind    byte
	offset  uint64
	payload []byte
}

var errFrame = errors.New("frame out of contract")

func putFrameHeader(head []byte, kind byte, length int, offset uint64) {
	head[0], head[1], head[2], head[3] = kind, 0, 0, 0
	binary.BigEndian.PutUint32(head[4:], uint32(length))
	binary.BigEndian.PutUint64(head[8:], offset)
}

func encodeFrame(kind byte, offset uint64, payload []byte) []byte {
	out := make([]byte, frameHeaderBytes+len(payload))
	putFrameHeader(out, kind, len(payload), offset)
	copy(out[frameHeaderBytes:], payload)
	return out
}

// readFrame reads one frame from the host; only the kinds that a host sends pass. buffer is used when it is large enough.
func readFrame(r io.Reader, buffer []byte) (frame, error) {
	var head [frameHeaderBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return frame{}, err
	}
	f := frame{kind: head[0], offset: binary.BigEndian.Uint64(head[8:])}
	length := binary.BigEndian.Uint32(head[4:])
	if f.kind < frameStdin || f.kind > frameKill || head[1] != 0 || head[2] != 0 || head[3] != 0 || length > maxFramePayload {
		return frame{}, errFrame
	}
	if int(length) > len(buffer) {
		buffer = make([]byte, length)
	}
	f.payload = buffer[:length]
	_, err := io.ReadFull(r, f.payload)
	return f, err
}
