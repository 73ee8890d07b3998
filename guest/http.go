package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// A strict HTTP/1.1 server of the few things the contract needs. With net/http an agent weighs 2 MB more, and a command
// starts 1 ms later (measured in gVisor).

const (
	headBytes      = 16 << 10
	jsonBytes      = 2 << 20
	maxConnections = 512
	headTime       = 10 * time.Second // from a head's first byte to its end
	idleTime       = 10 * time.Minute // between two requests
	stallTime      = 60 * time.Second // for the peer to take or give the next bytes
	lingerTime     = 30 * time.Second // an upload that was answered early is read and thrown away for so long
	framesProtocol = "cpuos-frames/1"
)

var (
	errHead       = invalid("the request head is out of contract")
	errIncomplete = fail(400, "upload_incomplete", "the body ended before its announced length")
)

// link is a connection of the host.
type link struct {
	*net.TCPConn
	limit *io.LimitedReader // counts a head's bytes
	in    *bufio.Reader
}

// request is one call; reading it gives its body.
type request struct {
	link
	method, path, id             string // id: of the command, or the port, that the path names
	query                        map[string]string
	authorization, upgrade       string
	expects, keepAlive, answered bool
	chunked, chunkRead, bodyEnd  bool
	remaining                    int64 // bytes of the body, or of its present chunk, not yet read
}

func (a *agent) serveConn(tcp *net.TCPConn) {
	defer tcp.Close()
	defer func() {
		if fault := recover(); fault != nil {
			warn(fmt.Errorf("fault in a call: %v", fault))
		}
	}()
	if !a.remember(tcp) {
		return
	}
	defer a.forget(tcp)
	limit := &io.LimitedReader{R: tcp}
	l := link{tcp, limit, bufio.NewReaderSize(limit, 4096)}
	for l.serveNext(a) {
	}
}

// serveNext is false when the connection is of no more use.
func (l link) serveNext(a *agent) bool {
	l.limit.N = headBytes
	l.SetReadDeadline(now().Add(idleTime))
	if _, err := l.in.Peek(1); err != nil {
		return false
	}
	l.SetReadDeadline(now().Add(headTime))
	r := &request{link: l}
	err := attempt(func() {
		r.readHead()
		l.limit.N = 1 << 62
		if answer := a.serve(r); !r.answered {
			r.reply(200, answer)
		}
	})
	l.limit.N = 1 << 62
	if err != nil && !r.answered {
		problem := asAPIError(err)
		r.keepAlive = attempt(func() { r.reply(problem.status, problem) }) == nil && r.keepAlive
	} else if err != nil {
		return false
	}
	if !r.bodyEnd { // let the peer read the answer first: closing on unread bytes would reset the connection
		l.CloseWrite()
		l.SetReadDeadline(now().Add(lingerTime))
		io.Copy(io.Discard, struct{ io.Reader }{l.in})
	}
	return r.bodyEnd && r.keepAlive && !errors.Is(err, errThreadLost)
}

func (r *request) readHead() {
	text := textproto.NewReader(r.in)
	first, e1 := text.ReadLine()
	header, e2 := text.ReadMIMEHeader()
	parts := strings.Split(first, " ")
	if e1 != nil || e2 != nil || len(parts) != 3 || parts[2] != "HTTP/1.1" || !strings.HasPrefix(parts[1], "/") {
		check(errHead)
	}
	one := func(name string) string {
		if len(header[name]) > 1 {
			check(errHead)
		}
		return header.Get(name)
	}
	path, query, _ := strings.Cut(parts[1], "?")
	r.method, r.path, r.query, r.authorization = parts[0], path, parseQuery(query), one("Authorization")
	switch length, coding := one("Content-Length"), one("Transfer-Encoding"); {
	case length != "" && coding == "":
		r.remaining = parseNumber(length, 10, errHead)
	case strings.EqualFold(coding, "chunked") && length == "":
		r.chunked = true
	case length != "" || coding != "":
		check(errHead)
	}
	r.bodyEnd = !r.chunked && r.remaining == 0
	r.expects = strings.EqualFold(one("Expect"), "100-continue")
	connection := strings.ToLower(one("Connection"))
	r.keepAlive = !strings.Contains(connection, "close")
	if strings.Contains(connection, "upgrade") {
		r.upgrade = one("Upgrade")
	}
}

// parseQuery decodes percent-encoded bytes; a plus is a plus.
func parseQuery(text string) map[string]string {
	query := map[string]string{}
	for pair := range strings.SplitSeq(text, "&") {
		name, encoded, _ := strings.Cut(pair, "=")
		value, err := url.PathUnescape(encoded)
		if _, twice := query[name]; twice || err != nil {
			check(errHead)
		}
		query[name] = value
	}
	return query
}

func parseNumber(text string, base int, problem *apiError) int64 {
	n, err := strconv.ParseUint(text, base, 62)
	if err != nil {
		check(problem)
	}
	return int64(n)
}

// flag reads a true/false parameter.
func (r *request) flag(name string, standard bool) bool {
	value, given := r.query[name]
	if given && value != "true" && value != "false" {
		check(invalid("%s is true or false", name))
	}
	return value == "true" || (!given && standard)
}

// number reads an unsigned parameter in the given base.
func (r *request) number(name string, standard int64, base int) int64 {
	if value, given := r.query[name]; given {
		return parseNumber(value, base, invalid("%s is not a number: %s", name, value))
	}
	return standard
}

// Read gives the body. Its early end is errIncomplete, never io.EOF.
func (r *request) Read(p []byte) (n int, err error) {
	r.SetReadDeadline(now().Add(stallTime))
	if r.expects {
		r.expects = false
		r.send([]byte("HTTP/1.1 100 Continue\r\n\r\n"))
	}
	if r.chunked && r.remaining == 0 && !r.bodyEnd {
		err = r.nextChunk()
	}
	if r.bodyEnd {
		return 0, io.EOF
	}
	if err == nil {
		n, err = r.in.Read(p[:min(int64(len(p)), r.remaining)])
		r.remaining -= int64(n)
		r.bodyEnd = !r.chunked && r.remaining == 0
	}
	if err != nil && n == 0 {
		return 0, errIncomplete
	}
	return n, nil
}

func (r *request) nextChunk() error {
	if r.chunkRead {
		r.in.ReadSlice('\n') // the line end after a chunk's bytes
	}
	r.chunkRead = true
	line, err := r.in.ReadSlice('\n')
	if err != nil {
		return err
	}
	size, _, _ := strings.Cut(string(line), ";")
	n, err := strconv.ParseUint(strings.TrimSpace(size), 16, 62)
	r.remaining = int64(n)
	for err == nil && n == 0 && !r.bodyEnd { // trailers mean nothing here
		line, err = r.in.ReadSlice('\n')
		r.bodyEnd = strings.TrimSpace(string(line)) == ""
	}
	return err
}

// readJSON decodes a bounded body.
func (r *request) readJSON(into any) {
	body := got(io.ReadAll(io.LimitReader(r, jsonBytes+1)))
	if len(body) > jsonBytes {
		check(invalid("the body is over %d bytes", jsonBytes))
	}
	if err := json.Unmarshal(body, into); err != nil {
		check(invalid("the body is not the JSON of this call: %s", err))
	}
}

// head makes the first part of an answer; length -1 means chunked.
func (r *request) head(status int, kind string, length int64, more string) []byte {
	r.answered = true
	framing, text := "Transfer-Encoding: chunked", "OK"
	if length >= 0 {
		framing = "Content-Length: " + strconv.FormatInt(length, 10)
	}
	if r.keepAlive = r.keepAlive && r.bodyEnd; !r.keepAlive {
		more += "Connection: close\r\n"
	}
	if status >= 400 {
		text = "Error"
	}
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\n%s\r\n%s\r\n", status, text, kind, framing, more)
}

func (r *request) reply(status int, body any) {
	data := got(json.Marshal(body))
	r.send(r.head(status, "application/json", int64(len(data)), ""), data)
}

func (r *request) demandUpgrade(protocol string) {
	if r.upgrade != protocol {
		check(invalid("this call needs Upgrade: %s", protocol))
	}
}

func (r *request) upgradeHead() []byte {
	r.answered, r.keepAlive = true, false
	r.SetReadDeadline(never)
	return []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + r.upgrade + "\r\n\r\n")
}

func (l link) send(parts ...[]byte) {
	l.SetWriteDeadline(now().Add(stallTime))
	buffers := net.Buffers(parts)
	got(buffers.WriteTo(l.TCPConn))
}

func (l link) sendJSON(kind byte, body any) { l.send(encodeFrame(kind, 0, got(json.Marshal(body)))) }

// cut ends a connection whoever uses it: closing alone would wake nobody who is in a call that blocks.
func cut(tcp *net.TCPConn) {
	tcp.CloseRead()
	tcp.CloseWrite()
	tcp.Close()
}
