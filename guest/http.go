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
	"os"
	"strconv"
	"strings"
	"time"
)

// A strict HTTP/1.1 server of the few things the contract needs: net/http would cost more memory than all the rest.

const (
	maxHeadBytes   = 16 << 10
	maxJSONBytes   = 2 << 20
	maxConnections = 512
	headTime       = 10 * time.Second // from a head's first byte to its end
	idleTime       = 10 * time.Minute // between two requests
	stallTime      = 60 * time.Second // for the peer to take or give the next bytes of a body
	lingerTime     = 30 * time.Second // an upload that was answered early is read and thrown away for so long
)

var (
	errHead       = invalid("the request head is out of contract")
	errIncomplete = fail(400, "upload_incomplete", "the body ended before its announced length")
)

type conn struct {
	tcp   *net.TCPConn
	limit *io.LimitedReader // counts a head's bytes
	in    *bufio.Reader
}

// request is one parsed head; reading it gives its body.
type request struct {
	*conn
	method, path  string
	query         map[string]string
	authorization string
	upgrade       string
	problem       error // the first parameter that could not be read
	expects       bool
	keepAlive     bool
	answered      bool
	chunked       bool
	begun         bool  // a chunk was read before
	bodyEnd       bool  // all of the body was read
	remaining     int64 // bytes of the body, or of its current chunk, not yet read
}

func (a *agent) serveConn(tcp *net.TCPConn) {
	limit := &io.LimitedReader{R: tcp}
	c := &conn{tcp: tcp, limit: limit, in: bufio.NewReaderSize(limit, 4096)}
	defer tcp.Close()
	defer func() {
		if fault := recover(); fault != nil {
			fmt.Fprintf(os.Stderr, "cpuos-agent: fault in a call: %v\n", fault)
		}
	}()
	if !a.rememberConn(c) {
		return
	}
	defer a.forgetConn(c)
	for {
		limit.N = maxHeadBytes
		tcp.SetReadDeadline(now().Add(idleTime))
		if _, err := c.in.Peek(1); err != nil {
			return
		}
		tcp.SetReadDeadline(now().Add(headTime))
		r, err := c.readHead()
		limit.N = 1 << 62
		if err == nil {
			err = a.serve(r)
		}
		if err != nil && !r.answered {
			problem := asAPIError(err)
			r.reply(problem.status, problem)
		}
		if !r.answered || errors.Is(err, errThreadLost) {
			return
		}
		if !r.bodyEnd {
			c.linger()
		}
		if !r.bodyEnd || !r.keepAlive {
			return
		}
	}
}

// linger lets the peer read the answer before the connection goes: closing on unread bytes would reset it.
func (c *conn) linger() {
	c.tcp.CloseWrite()
	c.tcp.SetReadDeadline(now().Add(lingerTime))
	b := blocks.take()
	defer blocks.give(b, blockBytes)
	for {
		if _, err := c.in.Read(b[:]); err != nil {
			return
		}
	}
}

// readHead parses a head. The request it gives beside an error can only be answered, not read.
func (c *conn) readHead() (*request, error) {
	text := textproto.NewReader(c.in)
	r := &request{conn: c, keepAlive: true}
	first, e1 := text.ReadLine()
	header, e2 := text.ReadMIMEHeader()
	parts := strings.Split(first, " ")
	if e1 != nil || e2 != nil || len(parts) != 3 || parts[2] != "HTTP/1.1" || !strings.HasPrefix(parts[1], "/") {
		return r, errHead
	}
	for _, name := range []string{"Content-Length", "Transfer-Encoding", "Authorization", "Upgrade", "Connection"} {
		if len(header[name]) > 1 {
			return r, errHead
		}
	}
	path, query, _ := strings.Cut(parts[1], "?")
	r.method, r.path, r.authorization = parts[0], path, header.Get("Authorization")
	var err error
	if r.query, err = parseQuery(query); err != nil {
		return r, err
	}
	switch length, coding := header.Get("Content-Length"), header.Get("Transfer-Encoding"); {
	case length != "" && coding == "":
		n, err := strconv.ParseUint(length, 10, 62)
		if err != nil {
			return r, errHead
		}
		r.remaining = int64(n)
	case strings.EqualFold(coding, "chunked") && length == "":
		r.chunked = true
	case length != "" || coding != "":
		return r, errHead
	}
	r.bodyEnd = !r.chunked && r.remaining == 0
	r.expects = strings.EqualFold(header.Get("Expect"), "100-continue")
	connection := strings.ToLower(header.Get("Connection"))
	r.keepAlive = !strings.Contains(connection, "close")
	if strings.Contains(connection, "upgrade") {
		r.upgrade = header.Get("Upgrade")
	}
	return r, nil
}

// parseQuery decodes percent-encoded bytes; a plus is a plus.
func parseQuery(text string) (map[string]string, error) {
	query := map[string]string{}
	for pair := range strings.SplitSeq(text, "&") {
		name, value, _ := strings.Cut(pair, "=")
		value, err := url.PathUnescape(value)
		if _, twice := query[name]; twice || err != nil {
			return nil, errHead
		}
		query[name] = value
	}
	return query, nil
}

// flag reads a true/false parameter; like number it leaves its problem in the request.
func (r *request) flag(name string, standard bool) bool {
	switch value, given := r.query[name]; {
	case value == "true" || value == "false":
		return value == "true"
	case given:
		r.problem = errors.Join(r.problem, invalid("%s is true or false", name))
	}
	return standard
}

// number reads an unsigned parameter in the given base.
func (r *request) number(name string, standard int64, base int) int64 {
	value, given := r.query[name]
	if !given {
		return standard
	}
	n, err := strconv.ParseUint(value, base, 62)
	if err != nil {
		r.problem = errors.Join(r.problem, invalid("%s is not a number: %s", name, value))
	}
	return int64(n)
}

// Read gives the body. Its early end is errIncomplete, never io.EOF.
func (r *request) Read(p []byte) (int, error) {
	r.tcp.SetReadDeadline(now().Add(stallTime))
	if r.expects {
		r.expects = false
		r.tcp.Write([]byte("HTTP/1.1 100 Continue\r\n\r\n"))
	}
	if r.chunked && r.remaining == 0 && !r.bodyEnd && r.nextChunk() != nil {
		return 0, errIncomplete
	}
	if r.bodyEnd {
		return 0, io.EOF
	}
	n, err := r.in.Read(p[:min(int64(len(p)), r.remaining)])
	r.remaining -= int64(n)
	r.bodyEnd = !r.chunked && r.remaining == 0
	if err != nil && n == 0 {
		return 0, errIncomplete
	}
	return n, nil
}

func (r *request) nextChunk() error {
	if r.begun { // the line end after the last chunk's bytes
		if _, err := r.in.ReadSlice('\n'); err != nil {
			return err
		}
	}
	r.begun = true
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
func (r *request) readJSON(into any) error {
	body, err := io.ReadAll(io.LimitReader(r, maxJSONBytes+1))
	if err != nil {
		return err
	}
	if len(body) > maxJSONBytes {
		return invalid("the body is over %d bytes", maxJSONBytes)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return invalid("the body is not the JSON of this call: %s", err)
	}
	return nil
}

// head makes the first part of an answer; length -1 means chunked.
func (r *request) head(status int, kind string, length int64, more string) []byte {
	r.answered = true
	framing, closing, text := "Transfer-Encoding: chunked", "", "OK"
	if length >= 0 {
		framing = "Content-Length: " + strconv.FormatInt(length, 10)
	}
	if !r.keepAlive || !r.bodyEnd {
		closing = "Connection: close\r\n"
	}
	if status >= 400 {
		text = "Error"
	}
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\n%s\r\n%s%s\r\n", status, text, kind, framing, closing, more)
}

func (r *request) send(parts ...[]byte) error {
	r.tcp.SetWriteDeadline(now().Add(stallTime))
	buffers := net.Buffers(parts)
	_, err := buffers.WriteTo(r.tcp)
	return err
}

func (r *request) reply(status int, body any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return r.send(r.head(status, "application/json", int64(len(data)), ""), data)
}
