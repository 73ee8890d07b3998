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

// connectPort joins the call's connection to a server on the loopback: raw bytes both ways from the answer on.
func (a *agent) connectPort(r *request) any {
	port, err := strconv.ParseUint(r.id, 10, 16)
	demand(err == nil && port > 0 && r.bodyEnd, invalid("a port is 1 to 65535, and the call has no body"))
	r.demandUpgrade(tunnelProtocol)
	own := r.LocalAddr().(*net.TCPAddr).Port
	demand(int(port) != own, fail(403, "port_forbidden", "port %d is the agent's own", port))
	defer a.tunnels.Add(-1)
	demand(a.tunnels.Add(1) <= maxTunnels, fail(429, "limit_reached", "%d tunnels are open, the most that may be", maxTunnels))
	server := dialLoopback(r.id)
	a.mu.Lock()
	a.conns[server] = true // both sides are cut together
	a.mu.Unlock()
	defer func() {
		server.Close()
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.conns, server)
	}()
	r.send(r.upgradeHead())
	r.SetDeadline(never)
	got(server.Write(got(r.in.Peek(r.in.Buffered())))) // what came along with the head
	var half atomic.Bool                               // one side has ended
	done := make(chan error, 2)
	go func() { done <- attempt(func() { relay(server, r.TCPConn, &half) }) }()
	go func() { done <- attempt(func() { relay(r.TCPConn, server, &half) }) }()
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
	demand(err == nil, fail(404, "port_not_open", "nothing inside answers on port %s", port))
	return server.(*net.TCPConn)
}

var tunnelBuffers = sync.Pool{New: func() any { return new([tunnelBytes]byte) }}

// relay copies until one side's end and passes it on. A buffer is held only while bytes are under way, as most tunnels are
// idle. Once one side has ended, long silence of the other is an error: its peer may be gone.
func relay(to, from *net.TCPConn, half *atomic.Bool) {
	raw := got(from.SyscallConn())
	for n := 1; n > 0; {
		if half.Load() {
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
	half.Store(true)
	to.SetReadDeadline(now().Add(idleTime))
	check(to.CloseWrite())
}
