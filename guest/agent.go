package main

import (
	"crypto/ed25519"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

const contractGeneration = 1

// version is told by hello; the contract, not this number, says what the agent can do.
const version = "0.1.0"

type agent struct {
	sandbox  string
	nodeKey  ed25519.PublicKey
	peer     net.IP // the only address that may connect
	users    *userTable
	children *reaper
	started  time.Time

	mu         sync.Mutex // guards the rest
	generation int64
	sessionKey []byte
	conns      map[*conn]struct{}
	commands   map[string]*command
	logFolders []string
	environ    cachedFile
}

func newAgent(sandbox string, nodeKey ed25519.PublicKey, peer net.IP, userFolder string) *agent {
	return &agent{
		sandbox: sandbox, nodeKey: nodeKey, peer: peer, users: newUserTable(userFolder), children: newReaper(), started: time.Now(),
		environ: cachedFile{path: userFolder + "/environment"}, conns: map[*conn]struct{}{}, commands: map[string]*command{},
	}
}

// accept serves until the listener dies. Whoever is not the host side is cut at once: programs of the sandbox reach the
// address too, but only from its own one.
func (a *agent) accept(listener *net.TCPListener) {
	for {
		tcp, err := listener.AcceptTCP()
		if err != nil {
			fmt.Fprintf(os.Stderr, "cpuos-agent: cannot accept: %v\n", err)
			time.Sleep(20 * time.Millisecond)
			continue
		}
		if from, ok := tcp.RemoteAddr().(*net.TCPAddr); !ok || !from.IP.Equal(a.peer) {
			tcp.Close()
			continue
		}
		go a.serveConn(tcp)
	}
}

func (a *agent) rememberConn(c *conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.conns) >= maxConnections {
		return false
	}
	a.conns[c] = struct{}{}
	return true
}

func (a *agent) forgetConn(c *conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.conns, c)
}

// authorized compares the bearer with the session key, in the same time whatever it is.
func (a *agent) authorized(header string) bool {
	bearer, ok := strings.CutPrefix(header, "Bearer ")
	key, err := hex.DecodeString(bearer)
	a.mu.Lock()
	defer a.mu.Unlock()
	return ok && err == nil && a.sessionKey != nil && subtle.ConstantTimeCompare(key, a.sessionKey) == 1
}

type handler func(a *agent, r *request, id string) error

// routes are all calls of the contract; {id} stands for a command's id.
var routes = map[string]map[string]handler{
	"/v1/identity":             {"POST": (*agent).setIdentity},
	"/v1/hello":                {"GET": (*agent).hello},
	"/v1/clock":                {"POST": (*agent).setClock},
	"/v1/shutdown":             {"POST": (*agent).shutdown},
	"/v1/commands":             {"POST": (*agent).startCommand, "GET": (*agent).listCommands},
	"/v1/commands/{id}":        {"GET": (*agent).getCommand, "DELETE": (*agent).deleteCommand},
	"/v1/commands/{id}/attach": {"POST": (*agent).attachCommand},
	"/v1/commands/{id}/kill":   {"POST": (*agent).killCommand},
	"/v1/commands/{id}/resize": {"POST": (*agent).resizeCommand},
	"/v1/commands/{id}/stdin":  {"POST": (*agent).feedCommand},
	"/v1/files":                {"GET": (*agent).readFile, "PUT": (*agent).writeFile, "DELETE": (*agent).removeFile},
	"/v1/files/stat":           {"GET": (*agent).statFile},
	"/v1/files/list":           {"GET": (*agent).listFiles},
	"/v1/files/mkdir":          {"POST": (*agent).makeFolder},
	"/v1/files/move":           {"POST": (*agent).moveFile},
	"/v1/files/watch":          {"GET": (*agent).watchFiles},
	"/v1/files/tree":           {"GET": (*agent).readTree, "PUT": (*agent).writeTree},
}

func (a *agent) serve(r *request) error {
	path, id := r.path, ""
	if rest, ok := strings.CutPrefix(path, "/v1/commands/"); ok {
		var verb string
		id, verb, ok = strings.Cut(rest, "/")
		path = "/v1/commands/{id}"
		if ok {
			path += "/" + verb
		}
	}
	if path != "/v1/identity" && !a.authorized(r.authorization) {
		return fail(401, "identity_required", "this call needs the session key of the sandbox's present generation")
	}
	methods, ok := routes[path]
	if !ok {
		return fail(404, "not_found", "no such call")
	}
	handle, ok := methods[r.method]
	if !ok {
		return fail(405, "not_found", "the call has no method %q", r.method)
	}
	return handle(a, r, id)
}

type identity struct {
	Sandbox    string  `json:"sandbox"`
	Generation int64   `json:"generation"`
	ExpiresAt  float64 `json:"expires_at"`
	SessionKey []byte  `json:"session_key"`
	Hostname   string  `json:"hostname"`
	Now        float64 `json:"now"`
}

func (a *agent) setIdentity(r *request, _ string) error {
	var body struct{ Statement, Signature string }
	if err := r.readJSON(&body); err != nil {
		return err
	}
	refused := fail(401, "identity_refused", "the statement is not one of this sandbox's node, or not a newer one")
	statement, e1 := base64.StdEncoding.DecodeString(body.Statement)
	signature, e2 := base64.StdEncoding.DecodeString(body.Signature)
	if e1 != nil || e2 != nil || !ed25519.Verify(a.nodeKey, append([]byte("cpuos-identity-v1\n"), statement...), signature) {
		return refused
	}
	var claim identity
	if json.Unmarshal(statement, &claim) != nil || claim.Sandbox != a.sandbox || claim.ExpiresAt <= claim.Now || len(claim.SessionKey) != 32 {
		return refused
	}
	if !a.accepts(r.conn, claim) {
		return refused
	}
	return a.hello(r, "")
}

// accepts takes a newer generation, or a repeat of the present one. A newer one cuts whoever spoke for the older.
func (a *agent) accepts(from *conn, claim identity) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if claim.Generation == a.generation {
		return a.sessionKey != nil && subtle.ConstantTimeCompare(claim.SessionKey, a.sessionKey) == 1
	}
	if claim.Generation < a.generation {
		return false
	}
	a.generation, a.sessionKey = claim.Generation, claim.SessionKey
	for c := range a.conns {
		if c != from {
			c.cut()
		}
	}
	if claim.Hostname != "" && os.Getpid() == 1 {
		syscall.Sethostname([]byte(claim.Hostname)) // refused in runtimes that set it themselves
	}
	return true
}

func (a *agent) hello(r *request, _ string) error {
	a.mu.Lock()
	generation, running := a.generation, 0
	for _, c := range a.commands {
		if !c.hasEnded() {
			running++
		}
	}
	a.mu.Unlock()
	return r.reply(200, map[string]any{
		"contract": contractGeneration, "agent": version, "sandbox": a.sandbox, "generation": generation,
		"boot_s": time.Since(a.started).Seconds(), "commands": running,
	})
}

func (a *agent) setClock(r *request, _ string) error {
	var body struct{ Now float64 }
	if err := r.readJSON(&body); err != nil {
		return err
	}
	if body.Now <= 0 {
		return invalid("now is a positive number of unix seconds")
	}
	at := syscall.NsecToTimeval(int64(body.Now * 1e9))
	return r.reply(200, map[string]any{"set": syscall.Settimeofday(&at) == nil})
}

func (a *agent) shutdown(r *request, _ string) error {
	syscall.Sync()
	return r.reply(200, map[string]any{"synced": true})
}
