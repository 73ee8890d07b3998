package main

import (
	"crypto/ed25519"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"log"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/singleflight"
)

const (
	contractGeneration = 1
	version            = "0.1.0" // told by hello; the contract, not this number, says what the agent can do
)

type agent struct {
	sandbox  string
	nodeKey  ed25519.PublicKey
	users    *userTable
	children *reaper
	started  time.Time
	tunnels  atomic.Int32       // open ones
	starts   singleflight.Group // of commands, by id
	logs     logFolders
	prepare  func() // returns when this process is fit for more than to say who it is

	mu         sync.Mutex // guards the rest
	generation int64
	sessionKey []byte
	conns      map[*net.TCPConn]bool
	commands   map[string]*command
	leaders    map[int]*command // the newest command whose program has this process number
}

func newAgent(sandbox string, nodeKey ed25519.PublicKey, etc string) *agent {
	return &agent{
		sandbox: sandbox, nodeKey: nodeKey, users: &userTable{folder: etc}, children: &reaper{waiters: map[int]func(syscall.WaitStatus){}, born: make(chan os.Signal, 1)}, started: now(),
		prepare: func() {}, conns: map[*net.TCPConn]bool{}, commands: map[string]*command{}, leaders: map[int]*command{},
	}
}

// accept serves until the agent ends. Whoever is not the host side is cut at once: programs of the sandbox reach the
// address too, but only from its own one.
func (a *agent) accept(listener net.Listener, peer net.IP) {
	for {
		c, err := listener.Accept()
		if err != nil {
			log.Print(err)
			time.Sleep(20 * time.Millisecond)
			continue
		}
		tcp := c.(*net.TCPConn)
		a.mu.Lock()
		if len(a.conns) < maxConnections && tcp.RemoteAddr().(*net.TCPAddr).IP.Equal(peer) {
			a.conns[tcp] = true
			go a.serveConn(tcp)
		} else {
			tcp.Close()
		}
		a.mu.Unlock()
	}
}

// authorized compares the bearer with the session key, in the same time whatever it is.
func (a *agent) authorized(header string) bool {
	bearer, ok := strings.CutPrefix(header, "Bearer ")
	key, err := hex.DecodeString(bearer)
	a.mu.Lock()
	defer a.mu.Unlock()
	return ok && err == nil && a.sessionKey != nil && subtle.ConstantTimeCompare(key, a.sessionKey) == 1
}

type handler = func(a *agent, r *request) any

// routes are all calls of the contract; ID stands for a command's id or a port. What a handler gives is the answer's JSON.
var routes = map[string]handler{
	"POST /v1/identity":           (*agent).setIdentity,
	"GET /v1/hello":               (*agent).hello,
	"POST /v1/clock":              (*agent).setClock,
	"POST /v1/shutdown":           (*agent).shutdown,
	"GET /v1/commands":            (*agent).listCommands,
	"POST /v1/commands":           (*agent).startCommand,
	"GET /v1/commands/ID":         (*agent).getCommand,
	"DELETE /v1/commands/ID":      (*agent).deleteCommand,
	"POST /v1/commands/ID/attach": (*agent).attachCommand,
	"POST /v1/commands/ID/kill":   (*agent).killCommand,
	"POST /v1/ports/ID/connect":   (*agent).connectPort,
	"GET /v1/files":               onPath("read", (*agent).readFile),
	"PUT /v1/files":               onPath("write", (*agent).writeFile),
	"DELETE /v1/files":            asUser("remove", (*agent).removeFile),
	"GET /v1/files/stat":          asUser("stat", (*agent).statFile),
	"GET /v1/files/list":          asUser("list", (*agent).listFiles),
	"POST /v1/files/mkdir":        asUser("make folder", (*agent).makeFolder),
	"POST /v1/files/move":         asUser("move", (*agent).moveFile),
	"GET /v1/files/watch":         onPath("watch", (*agent).watchFiles),
	"GET /v1/files/tree":          asUser("read tree", (*agent).readTree),
	"PUT /v1/files/tree":          asUser("write tree", (*agent).writeTree),
}

func (a *agent) serve(r *request) any {
	parts := strings.Split(r.URL.Path, "/")
	if len(parts) > 3 && (parts[2] == "commands" || parts[2] == "ports") {
		r.id, parts[3] = parts[3], "ID"
	}
	route := r.Method + " " + strings.Join(parts, "/")
	if route != "POST /v1/identity" {
		known := a.authorized(r.Header.Get("Authorization"))
		demand(known, fail(401, "identity_required", "this call needs the session key of the sandbox's present generation"))
		a.prepare()
	}
	handle := routes[route]
	demand(handle != nil, fail(404, "not_found", "no such call"))
	return handle(a, r)
}

type identity struct {
	Sandbox    string
	Generation int64
	ExpiresAt  float64 `json:"expires_at"`
	SessionKey []byte  `json:"session_key"`
	Hostname   string
	Now        float64
}

func (a *agent) setIdentity(r *request) any {
	var body struct{ Statement, Signature []byte }
	r.readJSON(&body)
	var claim identity
	signed := slices.Concat([]byte("cpuos-identity-v1\n"), body.Statement)
	if !ed25519.Verify(a.nodeKey, signed, body.Signature) || json.Unmarshal(body.Statement, &claim) != nil ||
		claim.Sandbox != a.sandbox || claim.ExpiresAt <= claim.Now || len(claim.SessionKey) != 32 || !a.accepts(r.TCPConn, claim) {
		check(fail(401, "identity_refused", "the statement is not one of this sandbox's node, or not a newer one"))
	}
	go a.prepare() // the host waits for this answer, and takes a moment until its next call
	return a.hello(r)
}

// accepts takes a newer generation, or a repeat of the present one. A newer one cuts whoever spoke for the older.
func (a *agent) accepts(from *net.TCPConn, claim identity) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if claim.Generation <= a.generation {
		return claim.Generation == a.generation && subtle.ConstantTimeCompare(claim.SessionKey, a.sessionKey) == 1
	}
	a.generation, a.sessionKey = claim.Generation, claim.SessionKey
	for tcp := range a.conns {
		if tcp != from {
			cut(tcp)
		}
	}
	if claim.Hostname != "" && os.Getpid() == 1 {
		syscall.Sethostname([]byte(claim.Hostname)) // refused in runtimes that set it themselves
	}
	return true
}

func (a *agent) hello(*request) any {
	running := slices.DeleteFunc(a.allCommands(), (*command).hasEnded)
	a.mu.Lock()
	defer a.mu.Unlock()
	return map[string]any{
		"contract": contractGeneration, "agent": version, "sandbox": a.sandbox, "generation": a.generation,
		"boot_s": elapsed(a.started, now()), "commands": len(running),
	}
}

func (a *agent) setClock(r *request) any {
	var body struct{ Now float64 }
	r.readJSON(&body)
	demand(body.Now > 0, invalid("now is a positive number of unix seconds"))
	at := syscall.NsecToTimeval(int64(body.Now * 1e9))
	return map[string]any{"set": syscall.Settimeofday(&at) == nil}
}

func (a *agent) shutdown(*request) any {
	syscall.Sync()
	return map[string]any{"synced": true}
}
