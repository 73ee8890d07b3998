package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// A strict HTTP/1.1 server of the few things the contract needs: net/http would cost more memory than all the rest.

const (
	maxHeadBytes   = 16 << 10
	maxJSONBytes   = 2 << 20
	maxJSONDepth   = 16
	maxConnections = 512
	headTime       = 10 * time.Second // from a head's first byte to its end
	idleTime       = 10 * time.Minute // between two requests
	stallTime      = 60 * time.Second // for the peer to take or give the next bytes of a body
	lingerTime     = 30 * time.Second // an upload that was answered early is read and thrown away for so long
)

var (
	errHead       = errors.New("request head out of contract")
	errIncomplete = fail(400, "upload_incomplete", "the body ended before its announced length")
)

type conn struct {
	*net.TCPConn
	in    *bufio.Reader
	agent *agent
}

// request is one parsed head; reading it gives its body.
type request struct {
	*conn
	method, path  string
	query         map[string]string
	authorization string
	upgrade       string
	expects       bool
	keepAlive     bool
	answered      bool
	chunked       bool
	remaining     int64 // bytes of the body, or of its current chunk, not yet read
	begun         bool  // a chunk was read before
	bodyEnd       bool
	length        int64 // announced, or -1
}

func (a *agent) serveConn(tcp *net.TCPConn) {
	c := &conn{TCPConn: tcp, in: bufio.NewReaderSize(tcp, 4096), agent: a}
	if !a.rememberConn(c) {
		tcp.Close()
		return
	}
	defer a.forgetConn(c)
	defer tcp.Close()
	defer func() {
		if fault := recover(); fault != nil {
			fmt.Fprintf(os.Stderr, "cpuos-agent: fault in a call: %v\n", fault)
		}
	}()
	for {
		tcp.SetReadDeadline(time.Now().Add(idleTime))
		if _, err := c.in.Peek(1); err != nil {
			return
		}
		tcp.SetReadDeadline(time.Now().Add(headTime))
		r, err := c.readHead()
		if err != nil {
			r = &request{conn: c, bodyEnd: true}
			r.reply(400, invalid("%s", err))
			c.linger(r)
			return
		}
		err = a.serve(r)
		if err != nil && !r.answered {
			problem := asAPIError(err)
			r.reply(problem.status, problem)
		}
		if !r.answered || errors.Is(err, errThreadLost) {
			return
		}
		if !r.bodyEnd {
			c.linger(r)
			return
		}
		if !r.keepAlive {
			return
		}
	}
}

// linger lets the peer read the answer before the connection goes: closing on unread bytes would reset it.
func (c *conn) linger(r *request) {
	end := time.Now().Add(lingerTime)
	c.CloseWrite()
	block := blocks.take()
	defer blocks.give(block, blockBytes)
	for time.Now().Before(end) {
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.in.Read(block[:]); err != nil {
			return
		}
	}
}

// line reads one line of a head, paying from its budget.
func (c *conn) line(budget *int) (string, error) {
	var long []byte
	for {
		part, err := c.in.ReadSlice('\n')
		*budget -= len(part)
		if *budget < 0 {
			return "", errHead
		}
		if err == bufio.ErrBufferFull {
			long = append(long, part...)
			continue
		}
		if err != nil {
			return "", err
		}
		if long != nil {
			part = append(long, part...)
		}
		text, ok := strings.CutSuffix(string(part), "\r\n")
		if !ok {
			return "", errHead
		}
		return text, nil
	}
}

func (c *conn) readHead() (*request, error) {
	budget := maxHeadBytes
	first, err := c.line(&budget)
	if err != nil {
		return nil, err
	}
	parts := strings.Split(first, " ")
	if len(parts) != 3 || parts[2] != "HTTP/1.1" || !strings.HasPrefix(parts[1], "/") {
		return nil, errHead
	}
	r := &request{conn: c, method: parts[0], keepAlive: true, length: -1}
	path, query, _ := strings.Cut(parts[1], "?")
	r.path = path
	if r.query, err = parseQuery(query); err != nil {
		return nil, err
	}
	upgrades := false
	for {
		text, err := c.line(&budget)
		if err != nil {
			return nil, err
		}
		if text == "" {
			break
		}
		name, value, ok := strings.Cut(text, ":")
		if !ok || name == "" || strings.ContainsAny(name, " \t") || strings.ContainsAny(value, "\r\x00") {
			return nil, errHead
		}
		value = strings.Trim(value, " \t")
		switch strings.ToLower(name) {
		case "authorization":
			r.authorization = value
		case "content-length":
			n, err := strconv.ParseUint(value, 10, 62)
			if err != nil || r.length >= 0 || r.chunked {
				return nil, errHead
			}
			r.length = int64(n)
		case "transfer-encoding":
			if !strings.EqualFold(value, "chunked") || r.length >= 0 || r.chunked {
				return nil, errHead
			}
			r.chunked = true
		case "connection":
			for token := range strings.SplitSeq(strings.ToLower(value), ",") {
				switch strings.TrimSpace(token) {
				case "close":
					r.keepAlive = false
				case "upgrade":
					upgrades = true
				}
			}
		case "upgrade":
			r.upgrade = value
		case "expect":
			r.expects = strings.EqualFold(value, "100-continue")
		}
	}
	if !upgrades {
		r.upgrade = ""
	}
	r.remaining = max(r.length, 0)
	r.bodyEnd = !r.chunked && r.remaining == 0
	return r, nil
}

func parseQuery(text string) (map[string]string, error) {
	query := map[string]string{}
	for pair := range strings.SplitSeq(text, "&") {
		if pair == "" {
			continue
		}
		name, value, _ := strings.Cut(pair, "=")
		name, e1 := unescape(name)
		value, e2 := unescape(value)
		if _, twice := query[name]; twice || e1 != nil || e2 != nil {
			return nil, errHead
		}
		query[name] = value
	}
	return query, nil
}

// unescape gives the bytes of percent-encoded text; a plus is a plus.
func unescape(text string) (string, error) {
	if !strings.Contains(text, "%") {
		return text, nil
	}
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] != '%' {
			out = append(out, text[i])
			continue
		}
		if i+2 >= len(text) {
			return "", errHead
		}
		value, err := strconv.ParseUint(text[i+1:i+3], 16, 8)
		if err != nil {
			return "", errHead
		}
		out = append(out, byte(value))
		i += 2
	}
	return string(out), nil
}

// flag reads a true/false parameter.
func (r *request) flag(name string, standard bool) (bool, error) {
	switch value, given := r.query[name]; {
	case !given:
		return standard, nil
	case value == "true":
		return true, nil
	case value == "false":
		return false, nil
	}
	return false, invalid("%s is true or false", name)
}

// number reads an unsigned parameter in the given base.
func (r *request) number(name string, standard int64, base int) (int64, error) {
	value, given := r.query[name]
	if !given {
		return standard, nil
	}
	n, err := strconv.ParseUint(value, base, 62)
	if err != nil {
		return 0, invalid("%s is not a number: %s", name, value)
	}
	return int64(n), nil
}

// Read gives the body. Its early end is errIncomplete, never io.EOF.
func (r *request) Read(p []byte) (int, error) {
	if r.expects {
		r.expects = false
		r.Write([]byte("HTTP/1.1 100 Continue\r\n\r\n"))
	}
	if r.chunked && r.remaining == 0 && !r.bodyEnd {
		if err := r.nextChunk(); err != nil {
			return 0, errIncomplete
		}
	}
	if r.bodyEnd {
		return 0, io.EOF
	}
	if int64(len(p)) > r.remaining {
		p = p[:r.remaining]
	}
	r.SetReadDeadline(time.Now().Add(stallTime))
	n, err := r.in.Read(p)
	r.remaining -= int64(n)
	if r.remaining == 0 && !r.chunked {
		r.bodyEnd = true
	}
	if err != nil && n == 0 {
		return 0, errIncomplete
	}
	return n, nil
}

func (r *request) nextChunk() error {
	budget := maxHeadBytes
	r.SetReadDeadline(time.Now().Add(stallTime))
	if r.begun {
		if text, err := r.line(&budget); err != nil || text != "" {
			return errHead
		}
	}
	r.begun = true
	text, err := r.line(&budget)
	if err != nil {
		return err
	}
	size, _, _ := strings.Cut(text, ";")
	n, err := strconv.ParseUint(strings.TrimSpace(size), 16, 62)
	if err != nil {
		return err
	}
	r.remaining = int64(n)
	if n > 0 {
		return nil
	}
	for { // trailers mean nothing here
		text, err := r.line(&budget)
		if err != nil {
			return err
		}
		if text == "" {
			r.bodyEnd = true
			return nil
		}
	}
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
	depth, inText := 0, false
	for i := 0; i < len(body); i++ {
		switch b := body[i]; {
		case inText && b == '\\':
			i++
		case b == '"':
			inText = !inText
		case !inText && (b == '{' || b == '['):
			if depth++; depth > maxJSONDepth {
				return invalid("the body is nested deeper than %d", maxJSONDepth)
			}
		case !inText && (b == '}' || b == ']'):
			depth--
		}
	}
	if err := json.Unmarshal(body, into); err != nil {
		return invalid("the body is not the JSON of this call: %s", err)
	}
	return nil
}

var statusTexts = map[int]string{
	101: "Switching Protocols", 200: "OK", 201: "Created", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden",
	404: "Not Found", 405: "Method Not Allowed", 409: "Conflict", 422: "Unprocessable", 429: "Too Many", 500: "Internal Error", 507: "Insufficient Storage",
}

// head writes the first part of an answer; length -1 means chunked.
func (r *request) head(status int, kind string, length int64, more string) error {
	r.answered = true
	text := fmt.Sprintf("HTTP/1.1 %d %s\r\n", status, statusTexts[status])
	if kind != "" {
		text += "Content-Type: " + kind + "\r\n"
	}
	if length >= 0 {
		text += "Content-Length: " + strconv.FormatInt(length, 10) + "\r\n"
	} else {
		text += "Transfer-Encoding: chunked\r\n"
	}
	if !r.keepAlive || !r.bodyEnd {
		text += "Connection: close\r\n"
	}
	return r.send([]byte(text + more + "\r\n"))
}

func (r *request) send(parts ...[]byte) error {
	r.SetWriteDeadline(time.Now().Add(stallTime))
	if len(parts) == 1 {
		_, err := r.Write(parts[0])
		return err
	}
	buffers := net.Buffers(parts)
	_, err := buffers.WriteTo(r.TCPConn)
	return err
}

func (r *request) reply(status int, body any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r.answered = true
	closing := ""
	if !r.keepAlive || !r.bodyEnd {
		closing = "Connection: close\r\n"
	}
	head := fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n", status, statusTexts[status], len(data), closing)
	return r.send(append([]byte(head), data...))
}
