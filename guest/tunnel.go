package main

import (
	"cmp"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	tunnelProtocol = "tunnel"
	tunnelBytes    = 64 << 10
	maxTunnels     = 256
	dialTime       = 2 * time.Second // to a server that is on this machine
)

// tunnel is the host's connection and one of a server inside, joined.
type tunnel struct{ half atomic.Bool } // one side has ended

// connectPort joins the call's connection to a server on the loopback: raw bytes both ways from the answer on.
func (a *agent) connectPort(r *request) any {
	problem := invalid("a port is 1 to 65535, and the call has no body")
	port := parseNumber(r.id, 10, problem)
	if port < 1 || port > 65535 || !r.bodyEnd {
		check(problem)
	}
	if r.demandUpgrade(tunnelProtocol); port == int64(r.LocalAddr().(*net.TCPAddr).Port) {
		check(fail(403, "port_forbidden", "port %d is the agent's own", port))
	}
	defer a.tunnels.Add(-1)
	if a.tunnels.Add(1) > maxTunnels {
		check(fail(429, "limit_reached", "%d tunnels are open, the most that may be", maxTunnels))
	}
	server := dialLoopback(strconv.Itoa(int(port)))
	defer server.Close()
	r.send(r.upgradeHead())
	r.SetDeadline(never)
	early := got(r.in.Peek(r.in.Buffered())) // what came along with the head
	got(server.Write(early))
	t, done := tunnel{}, make(chan error, 2)
	go func() { done <- attempt(func() { t.relay(server, r.TCPConn) }) }()
	go func() { done <- attempt(func() { t.relay(r.TCPConn, server) }) }()
	for range cap(done) {
		if err := <-done; err != nil { // no end but a fault: each side sees the difference
			r.SetLinger(0)
			server.SetLinger(0)
			check(err)
		}
	}
	return nil
}

// dialLoopback goes to where a server that says "localhost" may listen; no name of the guest's is looked up.
func dialLoopback(port string) *net.TCPConn {
	dialer := net.Dialer{Deadline: now().Add(dialTime)}
	server, err := dialer.Dial("tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		server, err = dialer.Dial("tcp", net.JoinHostPort("::1", port))
	}
	if err != nil {
		check(fail(404, "port_not_open", "nothing inside answers on port %s", port))
	}
	return server.(*net.TCPConn)
}

var tunnelBuffers = sync.Pool{New: func() any { return new([tunnelBytes]byte) }}

// relay copies until one side's end and passes it on. A buffer is held only while bytes are under way, as most tunnels are
// idle. Once one side has ended, long silence of the other is an error: its peer may be gone.
func (t *tunnel) relay(to, from *net.TCPConn) {
	raw := got(from.SyscallConn())
	for n := 1; n > 0; {
		if t.half.Load() {
			from.SetReadDeadline(now().Add(idleTime))
		}
		var buffer *[tunnelBytes]byte
		var failed error
		waited := raw.Read(func(fd uintptr) bool {
			buffer = tunnelBuffers.Get().(*[tunnelBytes]byte)
			if n, failed = syscall.Read(int(fd), buffer[:]); failed == syscall.EAGAIN {
				tunnelBuffers.Put(buffer)
			}
			return failed != syscall.EAGAIN
		})
		check(cmp.Or(waited, failed))
		got(to.Write(buffer[:n]))
		tunnelBuffers.Put(buffer)
	}
	t.half.Store(true)
	to.SetReadDeadline(now().Add(idleTime))
	check(to.CloseWrite())
}
