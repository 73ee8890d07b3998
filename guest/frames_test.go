package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

var frameKinds = map[string]byte{
	"STDOUT": frameStdout, "STDERR": frameStderr, "STARTED": frameStarted, "ENDED": frameEnded, "GAP": frameGap, "KEEPALIVE": frameKeepalive,
	"EVENT": frameEvent, "ERROR": frameError, "STDIN": frameStdin, "STDIN_END": frameStdinEnd, "ACK": frameAck, "RESIZE": frameResize,
	"KILL": frameKill,
}

func TestGoldenFrames(t *testing.T) {
	var golden struct {
		Frames []struct {
			Name, Kind, Payload, Frame string
			Offset                     json.Number
		}
		Refused []struct{ Name, Bytes string }
	}
	data, err := os.ReadFile("../api/frames.json")
	must(t, err)
	must(t, json.Unmarshal(data, &golden))
	for _, c := range golden.Frames {
		payload, _ := hex.DecodeString(c.Payload)
		var offset uint64
		must(t, json.Unmarshal([]byte(c.Offset), &offset))
		raw := encodeFrame(frameKinds[c.Kind], offset, payload)
		if hex.EncodeToString(raw) != c.Frame {
			t.Errorf("%s: encoded as %x, want %s", c.Name, raw, c.Frame)
		}
		f, err := readFrame(bytes.NewReader(raw), make([]byte, 4))
		if frameKinds[c.Kind] < frameStdin {
			if err == nil {
				t.Errorf("%s: a frame towards the host was taken from it", c.Name)
			}
		} else if err != nil || f.offset != offset || !bytes.Equal(f.payload, payload) {
			t.Errorf("%s: decoded as %v, %v", c.Name, f, err)
		}
	}
	for _, c := range golden.Refused {
		raw, _ := hex.DecodeString(c.Bytes)
		if _, err := readFrame(bytes.NewReader(raw), nil); err != errFrame {
			t.Errorf("%s: not refused: %v", c.Name, err)
		}
	}
}

func TestQueryIsBytes(t *testing.T) {
	for text, want := range map[string]string{
		"path=/a+b": "/a+b", "path=%2e%2e": "..", "path=%ff%0a": "\xff\n", "path=a%26b%3Dc%23d": "a&b=c#d", "path=a=b": "a=b", "": "",
	} {
		if query := parseQuery(text); query.Get("path") != want {
			t.Errorf("%q: %q", text, query.Get("path"))
		}
	}
	for _, text := range []string{"path=%", "path=%zz", "path=1&path=2"} {
		if attempt(func() { parseQuery(text) }) == nil {
			t.Errorf("%q was taken", text)
		}
	}
}

func TestUserTable(t *testing.T) {
	folder := t.TempDir()
	table := &userTable{folder: folder}
	if attempt(func() { table.find("user") }) == nil {
		t.Fatal("found a user in no table")
	}
	must(t, os.WriteFile(folder+"/passwd", []byte(testPasswd), 0o644))
	must(t, os.WriteFile(folder+"/group", []byte("user:x:12345:user\nmore:x:1:app,user\nbad:x:zz:user\n"), 0o644))
	u := table.find("user")
	if u.uid != 12345 || u.shell != "/bin/bash" || len(u.groups) != 2 || u.groups[1] != 1 {
		t.Fatalf("%+v", u)
	}
	if name, group := table.owner(12345, 99); name != "user" || group != "99" {
		t.Fatal(name, group)
	}
	must(t, os.WriteFile(folder+"/passwd", []byte(strings.ReplaceAll(testPasswd, "12345", "54321")), 0o644))
	if u = table.find("user"); u.uid != 54321 {
		t.Fatalf("the changed table was not read: %+v", u)
	}
}

func TestStdinQueueSkipsRepeats(t *testing.T) {
	reader, writer, err := os.Pipe()
	must(t, err)
	c := &command{stdin: &stdinQueue{file: writer}, wake: make(chan struct{}, 1)}
	put := func(offset uint64, data []byte) { c.takeStdin(offset, data, false) }
	put(0, []byte("hello "))
	put(3, []byte("lo world"))
	put(0, []byte("hello"))
	for _, bad := range []func(){func() { put(100, []byte("x")) }, func() { put(11, make([]byte, stdinBytes+1)) }} {
		if attempt(bad) == nil {
			t.Fatal("a gap or too much was taken")
		}
	}
	c.takeStdin(0, nil, true)
	var got bytes.Buffer
	got.ReadFrom(reader)
	if got.String() != "hello world" {
		t.Fatalf("%q", got.String())
	}
	if c.stdin.accepted != 11 {
		t.Fatal(c.stdin.accepted)
	}
}
