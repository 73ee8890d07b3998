package main

import (
	"cmp"
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
	nodeKey  ed25519.PublicKey
	users    *userTable
	children *reaper
	started  time.Time
	tunnels  atomic.Int32       // open ones
	starts   singleflight.Group // of commands, by id
	logs     logFolders
	prepare  func() // returns when this process is fit for more than to say who it is
	freezer  freezer

	mu       sync.Mutex // guards the rest
	identity identity   // the last accepted; but for the id, none at first
	frozen   string     // the freeze that the sandbox is under, also while it is made or ended
	conns    map[*net.TCPConn]bool
	commands map[string]*command
	leaders  map[int]*command // the newest command whose program has this process number
}

func newAgent(sandbox string, nodeKey ed25519.PublicKey, etc string) *agent {
	return &agent{
		identity: identity{Sandbox: sandbox}, nodeKey: nodeKey, users: &userTable{folder: etc}, children: &reaper{waiters: map[int]func(syscall.WaitStatus){}, born: make(chan struct{}, 1)}, started: now(),
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
	return ok && err == nil && a.identity.SessionKey != nil && subtle.ConstantTimeCompare(key, a.identity.SessionKey) == 1
}

type handler = func(a *agent, r *request) any

// routes are all calls of the contract; ID stands for a command's id or a port. What a handler gives is the answer's JSON.
var routes = map[string]handler{
	"POST /v1/identity":           (*agent).setIdentity,
	"GET /v1/hello":               (*agent).hello,
	"POST /v1/freeze":             (*agent).freeze,
	"POST /v1/thaw":               (*agent).thaw,
	"GET /v1/limits":              (*agent).listFull,
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
		demand(servedFrozen[route] || a.freezeUnder() == "", errFrozen)
		a.prepare()
	}
	handle := routes[route]
	demand(handle != nil, fail(404, "not_found", "no such call"))
	return handle(a, r)
}

type identity struct {
	Sandbox     string
	Generation  int64
	Incarnation int64
	ExpiresAt   float64 `json:"expires_at"`
	SessionKey  []byte  `json:"session_key"`
	Hostname    string
	Now         float64
	Thaw        string // the freeze that this identity ends
	From        string // the sandbox that froze
}

func (a *agent) setIdentity(r *request) any {
	var body struct {
		Statement, Signature []byte
		Expected             receipt // what there was when it froze, as the host has it
		Incomplete           bool    // go on without what is missing
	}
	r.readJSON(&body)
	var claim identity
	signed := slices.Concat([]byte("cpuos-identity-v1\n"), body.Statement)
	genuine := ed25519.Verify(a.nodeKey, signed, body.Signature) && json.Unmarshal(body.Statement, &claim) == nil &&
		claim.ExpiresAt > claim.Now && len(claim.SessionKey) == 32
	a.freezer.mu.Lock()
	defer a.freezer.mu.Unlock()
	before, frozen := a.present()
	if !genuine || !claim.repeats(before) && !claim.succeeds(before, frozen) {
		check(fail(401, "identity_refused", "the statement is not one of this sandbox's node, or not a newer one"))
	}
	go a.prepare() // the host waits for this answer, and takes a moment until its next call
	if !claim.repeats(before) {
		missing := []string{}
		if frozen != "" {
			missing = a.missing(body.Expected, r.LocalAddr().String())
		}
		if len(missing) > 0 && !body.Incomplete {
			check(&apiError{409, "restore_incomplete", "not all of it came back", 0, missing})
		}
		a.become(claim, r.TCPConn)
		if frozen != "" {
			a.freezer.thawed = a.goOnAs(claim, claim.Sandbox != before.Sandbox)
			a.freezer.thawed["missing"] = missing
		}
	}
	answer := a.hello(r).(map[string]any)
	if a.freezer.thawed != nil {
		answer["thawed"] = a.freezer.thawed
	}
	return answer
}

func (a *agent) present() (identity, string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.identity, a.frozen
}

// repeats is a statement of the identity that is accepted already.
func (claim identity) repeats(present identity) bool {
	same := claim.Sandbox == present.Sandbox && claim.Generation == present.Generation && claim.Incarnation == present.Incarnation
	return same && subtle.ConstantTimeCompare(claim.SessionKey, present.SessionKey) == 1 && (claim.Thaw == "" || claim.Thaw == present.Thaw)
}

// succeeds is a statement of a newer generation or incarnation; under a freeze one that ends it, for this sandbox or one
// that goes on from what was saved of it.
func (claim identity) succeeds(present identity, frozen string) bool {
	age := cmp.Or(cmp.Compare(claim.Generation, present.Generation), cmp.Compare(claim.Incarnation, present.Incarnation))
	if frozen != "" && claim.Sandbox != present.Sandbox {
		age = 1
	}
	ends := frozen != "" && claim.From == present.Sandbox || frozen == "" && claim.Sandbox == present.Sandbox
	return age > 0 && ends && claim.Thaw == frozen
}

// become cuts whoever spoke for the identity before.
func (a *agent) become(claim identity, from *net.TCPConn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.identity = claim
	for tcp := range a.conns {
		if tcp != from {
			cut(tcp)
		}
	}
	if claim.Hostname != "" && os.Getpid() == 1 {
		syscall.Sethostname([]byte(claim.Hostname)) // refused in runtimes that set it themselves
	}
}

func (a *agent) hello(*request) any {
	running := slices.DeleteFunc(a.allCommands(), (*command).hasEnded)
	a.mu.Lock()
	defer a.mu.Unlock()
	return map[string]any{
		"contract": contractGeneration, "agent": version, "sandbox": a.identity.Sandbox, "generation": a.identity.Generation,
		"incarnation": a.identity.Incarnation, "boot_s": elapsed(a.started, now()), "commands": len(running), "frozen": orNull(a.frozen),
	}
}
