package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// The HTTP/1.1 of the contract. net/http reads the requests; its server would weigh 2 MB more, and start a command 1 ms
// later (measured in gVisor).

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
	method, path, id       string // id: of the command, or the port, that the path names
	query                  url.Values
	authorization, upgrade string
	body                   io.Reader
	remaining              int64 // bytes of the body not yet read; negative: unknown
	expects, bodyEnd       bool
	keepAlive, answered    bool
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
	r := &request{link: l}
	err := attempt(func() {
		r.readHead()
		if answer := a.serve(r); !r.answered {
			r.reply(200, answer)
		}
	})
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
	r.SetReadDeadline(now().Add(headTime))
	head, err := http.ReadRequest(r.in)
	r.limit.N = math.MaxInt64
	if err != nil || !head.ProtoAtLeast(1, 1) {
		check(errHead)
	}
	r.method, r.path, r.query = head.Method, head.URL.Path, parseQuery(head.URL.RawQuery)
	r.authorization, r.upgrade = head.Header.Get("Authorization"), head.Header.Get("Upgrade")
	r.body, r.remaining, r.bodyEnd = head.Body, head.ContentLength, head.Body == http.NoBody
	r.expects = strings.EqualFold(head.Header.Get("Expect"), "100-continue")
	r.keepAlive = !head.Close
}

// parseQuery decodes percent-encoded bytes; a plus is a plus.
func parseQuery(text string) url.Values {
	query, err := url.ParseQuery(strings.ReplaceAll(text, "+", "%2B"))
	for _, values := range query {
		if len(values) > 1 {
			err = errHead
		}
	}
	if err != nil {
		check(errHead)
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
	switch value := r.query.Get(name); {
	case value == "true", value == "false":
		return value == "true"
	case r.query.Has(name):
		check(invalid("%s is true or false", name))
	}
	return standard
}

// number reads an unsigned parameter in the given base.
func (r *request) number(name string, standard int64, base int) int64 {
	if value := r.query.Get(name); r.query.Has(name) {
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
	n, err = r.body.Read(p)
	r.remaining -= int64(n)
	if r.bodyEnd = r.bodyEnd || err == io.EOF; err != nil && err != io.EOF {
		err = errIncomplete
	}
	return n, err
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
	framing := "Transfer-Encoding: chunked"
	if length >= 0 {
		framing = "Content-Length: " + strconv.FormatInt(length, 10)
	}
	if r.keepAlive = r.keepAlive && r.bodyEnd; !r.keepAlive {
		more += "Connection: close\r\n"
	}
	text := http.StatusText(status)
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\n%s\r\n%s\r\n", status, text, kind, framing, more)
}

func (r *request) reply(status int, body any) {
	data := got(json.Marshal(body))
	r.send(r.head(status, "application/json", int64(len(data)), ""), data)
}

// upgradeHead accepts the one protocol that a call can speak, or refuses any other.
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

func (l link) Write(p []byte) (int, error) { return len(p), attempt(func() { l.send(p) }) }

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
