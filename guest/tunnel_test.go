package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

const tunnelLines = "Connection: Upgrade\r\nUpgrade: tunnel\r\n"

// serveOn serves each connection to an address of the loopback, which the test agent shares.
func serveOn(t *testing.T, address string, serve func(c *net.TCPConn)) (port int) {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	must(t, err)
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			}()
		}
	}()
	return listener.Addr().(*net.TCPAddr).Port
}

func (a *testAgent) tunnel(port int) *peer {
	a.t.Helper()
	p := a.dial()
	p.request("POST", fmt.Sprintf("/v1/ports/%d/connect", port), nil, tunnelLines)
	if status, body := p.answer(); status != 101 {
		a.t.Fatalf("tunnel: %d %s", status, body)
	}
	return p
}

func echo(c *net.TCPConn) {
	io.Copy(c, struct{ io.Reader }{c})
	c.CloseWrite()
}

func TestTunnelCarriesBytesAndEnds(t *testing.T) {
	a := startAgent(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		port := serveOn(t, address, func(c *net.TCPConn) {
			got, _ := io.ReadAll(c) // nothing is said before the host's end came through
			fmt.Fprintf(c, "%d bytes, ", len(got))
			c.Write(got)
		})
		p := a.dial()
		data := bytes.Repeat([]byte("0123456789\n"), 500_000)
		p.request("POST", fmt.Sprintf("/v1/ports/%d/connect", port), nil, tunnelLines)
		p.Write(data[:100]) // before the answer
		if status, body := p.answer(); status != 101 {
			t.Fatalf("%s: %d %s", address, status, body)
		}
		p.Write(data[100:])
		must(t, p.CloseWrite())
		got, err := io.ReadAll(p.in)
		if want := fmt.Appendf(nil, "%d bytes, %s", len(data), data); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, %d bytes came back", address, err, len(got))
		}
	}
}

func TestTunnelOutlivesTheServersEnd(t *testing.T) {
	a := startAgent(t)
	heard := make(chan string)
	port := serveOn(t, "127.0.0.1:0", func(c *net.TCPConn) {
		io.WriteString(c, "bye")
		c.CloseWrite()
		got, _ := io.ReadAll(c)
		heard <- string(got)
	})
	p := a.tunnel(port)
	if got, err := io.ReadAll(p.in); err != nil || string(got) != "bye" {
		t.Fatalf("%v %q", err, got)
	}
	io.WriteString(p, "still here")
	must(t, p.CloseWrite())
	if got := <-heard; got != "still here" {
		t.Errorf("%q", got)
	}
}

func TestTunnelPassesAResetOn(t *testing.T) {
	a := startAgent(t)
	port := serveOn(t, "127.0.0.1:0", func(c *net.TCPConn) {
		c.Read(make([]byte, 1))
		c.SetLinger(0)
	})
	p := a.tunnel(port)
	io.WriteString(p, "x")
	if _, err := io.ReadAll(p.in); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a reset came as %v", err)
	}
	reset := make(chan error)
	port = serveOn(t, "127.0.0.1:0", func(c *net.TCPConn) {
		_, err := io.ReadAll(c)
		reset <- err
	})
	p = a.tunnel(port)
	p.SetLinger(0)
	p.Close()
	if err := <-reset; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a reset came as %v", err)
	}
}

func TestTunnelHoldsNothingForASlowReader(t *testing.T) {
	a := startAgent(t)
	wrote := make(chan int, 1)
	port := serveOn(t, "127.0.0.1:0", func(c *net.TCPConn) {
		c.SetWriteDeadline(time.Now().Add(2 * time.Second))
		n, _ := c.Write(make([]byte, 128<<20)) // ends when nobody takes more
		wrote <- n
	})
	a.tunnel(port)
	if n := <-wrote; n > 64<<20 {
		t.Errorf("%d bytes went into a tunnel that nobody reads", n)
	}
}

func TestTunnelErrors(t *testing.T) {
	a := startAgent(t)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	closed := free.Addr().(*net.TCPAddr).Port
	free.Close()
	open := serveOn(t, "127.0.0.1:0", echo)
	_, own, _ := strings.Cut(a.address, ":")
	ask := func(wanted int, code, port string, body any, lines string) {
		t.Helper()
		p := a.dial()
		defer p.Close()
		p.request("POST", "/v1/ports/"+port+"/connect", body, lines)
		if status, data := p.answer(); status != wanted || !strings.Contains(string(data), `"`+code+`"`) {
			t.Errorf("%s: %d %s, want %d %s", port, status, data, wanted, code)
		}
	}
	ask(404, "port_not_open", fmt.Sprint(closed), nil, tunnelLines)
	ask(403, "port_forbidden", own, nil, tunnelLines)
	for _, port := range []string{"0", "65536", "-1", "x", "", "99999999999999999999"} {
		ask(400, "invalid", port, nil, tunnelLines)
	}
	ask(400, "invalid", fmt.Sprint(open), nil, "")
	ask(400, "invalid", fmt.Sprint(open), nil, upgradeLines)
	ask(400, "invalid", fmt.Sprint(open), []byte("body"), tunnelLines)
	a.want(404, "not_found", "GET", fmt.Sprintf("/v1/ports/%d/connect", open), nil)
	right := a.key
	a.key = []byte("wrong")
	ask(401, "identity_required", fmt.Sprint(open), nil, tunnelLines)
	a.key = right
}

func TestTunnelsAreCountedAndCut(t *testing.T) {
	a := startAgent(t)
	port := serveOn(t, "127.0.0.1:0", echo)
	var open []*peer
	for range maxTunnels {
		open = append(open, a.tunnel(port))
	}
	target := fmt.Sprintf("/v1/ports/%d/connect", port)
	refused := a.dial()
	refused.request("POST", target, nil, tunnelLines)
	if status, body := refused.answer(); status != 429 || !strings.Contains(string(body), "limit_reached") {
		t.Errorf("%d %s", status, body)
	}
	open[0].Close()
	eventually(t, "room for another tunnel", func() bool {
		p := a.dial()
		p.request("POST", target, nil, tunnelLines)
		status, _ := p.answer()
		return status == 101
	})
	last := open[maxTunnels-1]
	io.WriteString(last, "ping")
	if got, err := last.in.Peek(4); string(got) != "ping" {
		t.Fatalf("%v %q", err, got)
	}
	if status, _ := a.identify(2, bytes.Repeat([]byte{2}, 32), nil); status != 200 {
		t.Fatal(status)
	}
	last.in.Discard(4)
	if _, err := last.in.Peek(1); err == nil {
		t.Error("a tunnel of the older generation lives on")
	}
}
