package main

import (
	"encoding/binary"
	"errors"
	"io"
)

// The frame format of api/guest.md; api/frames.json holds golden frames for this and every other implementation.
const (
	frameStdout = iota + 1
	frameStderr
	frameStarted
	frameEnded
	frameGap
	frameKeepalive
	frameEvent
	frameError

	frameStdin = iota + 8 // from here on towards the program
	frameStdinEnd
	frameAck
	frameResize
	frameKill

	frameHeaderBytes = 16
	maxFramePayload  = 1 << 20
)

type frame struct {
	kind    byte
	offset  uint64
	payload []byte
}

var errFrame = errors.New("frame out of contract")

func frameHeader(kind byte, length int, offset uint64) []byte {
	head := binary.BigEndian.AppendUint32([]byte{kind, 0, 0, 0}, uint32(length))
	return binary.BigEndian.AppendUint64(head, offset)
}

func encodeFrame(kind byte, offset uint64, payload []byte) []byte {
	return append(frameHeader(kind, len(payload), offset), payload...)
}

// readFrame reads one frame from the host; only the kinds that a host sends pass. buffer is used when it is large enough.
func readFrame(r io.Reader, buffer []byte) (f frame, err error) {
	var head [frameHeaderBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return f, err
	}
	length := binary.BigEndian.Uint32(head[4:])
	if head[0] < frameStdin || head[0] > frameKill || head[1]|head[2]|head[3] != 0 || length > maxFramePayload {
		return f, errFrame
	}
	if int(length) > len(buffer) {
		buffer = make([]byte, length)
	}
	f = frame{head[0], binary.BigEndian.Uint64(head[8:]), buffer[:length]}
	_, err = io.ReadFull(r, f.payload)
	return f, err
}
