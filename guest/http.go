package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
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
	maxConnections = 512 + maxTunnels
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
	*http.Request
	id                           string // of the command, or the port, that the path names
	query                        url.Values
	remaining                    int64 // bytes of the body not yet read; negative: unknown
	bodyEnd, keepAlive, answered bool
}

// serveConn serves a connection that is among the agent's, until one side is done with it.
func (a *agent) serveConn(tcp *net.TCPConn) {
	defer func() {
		if fault := recover(); fault != nil {
			log.Print("fault in a call: ", fault)
		}
		tcp.Close()
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.conns, tcp)
	}()
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
	if err != nil {
		problem := asAPIError(err)
		if r.answered || attempt(func() { r.reply(problem.status, problem) }) != nil {
			return false
		}
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
	demand(err == nil && head.ProtoAtLeast(1, 1), errHead)
	r.Request, r.query = head, parseQuery(head.URL.RawQuery)
	r.remaining, r.bodyEnd, r.keepAlive = head.ContentLength, head.Body == http.NoBody, !head.Close
}

// parseQuery decodes percent-encoded bytes; a plus is a plus.
func parseQuery(text string) url.Values {
	query, err := url.ParseQuery(strings.ReplaceAll(text, "+", "%2B"))
	demand(err == nil, errHead)
	for _, values := range query {
		demand(len(values) == 1, errHead)
	}
	return query
}

// parameter reads one of the query.
func parameter[T any](r *request, name string, standard T, parse func(text string) (T, error)) T {
	if !r.query.Has(name) {
		return standard
	}
	value, err := parse(r.query.Get(name))
	demand(err == nil, invalid("%s cannot be %s", name, r.query.Get(name)))
	return value
}

func (r *request) flag(name string, standard bool) bool {
	return parameter(r, name, standard, strconv.ParseBool)
}

// number reads an unsigned one.
func (r *request) number(name string, standard int64, base int) int64 {
	return parameter(r, name, standard, func(text string) (int64, error) {
		n, err := strconv.ParseUint(text, base, 62)
		return int64(n), err
	})
}

// Read gives the body. Its early end is errIncomplete, never io.EOF.
func (r *request) Read(p []byte) (n int, err error) {
	r.SetReadDeadline(now().Add(stallTime))
	if strings.EqualFold(r.Header.Get("Expect"), "100-continue") {
		r.Header.Del("Expect")
		r.send([]byte("HTTP/1.1 100 Continue\r\n\r\n"))
	}
	n, err = r.Body.Read(p)
	r.remaining -= int64(n)
	if r.bodyEnd = r.bodyEnd || err == io.EOF; err != nil && err != io.EOF {
		err = errIncomplete
	}
	return n, err
}

// readJSON decodes a bounded body.
func (r *request) readJSON(into any) {
	body := got(io.ReadAll(io.LimitReader(r, jsonBytes+1)))
	demand(len(body) <= jsonBytes, invalid("the body is over %d bytes", jsonBytes))
	err := json.Unmarshal(body, into)
	demand(err == nil, invalid("the body is not the JSON of this call: %v", err))
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

func (r *request) demandUpgrade(protocol string) {
	demand(r.Header.Get("Upgrade") == protocol, invalid("this call needs Upgrade: %s", protocol))
}

func (r *request) upgradeHead() []byte {
	r.answered, r.keepAlive = true, false
	r.SetReadDeadline(never)
	return []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + r.Header.Get("Upgrade") + "\r\n\r\n")
}

// Write sends, as send does, for those who want a writer.
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
