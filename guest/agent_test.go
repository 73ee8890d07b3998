package main

import (
	"bufio"
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The tests talk to a real agent: this test program itself, started again as PID 1 of a namespace of its own, with its own
// /proc, /var/log and a disk that is soon full.

const agentMark = "CPUOS_TEST_AGENT"

var nodeKey = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))

func TestMain(m *testing.M) {
	if os.Getenv(agentMark) != "" {
		os.Unsetenv(agentMark)
		main()
		return
	}
	os.Exit(m.Run())
}

type testAgent struct {
	t       *testing.T
	address string
	folder  string // the user's, writable
	key     []byte
	process *exec.Cmd

	expected   with // what its identities say that there was at a freeze
	incomplete bool
}

const testPasswd = "root:x:0:0:root:/root:/bin/bash\nuser:x:12345:12345:User:/tmp:/bin/bash\napp:x:12346:12346::/:/bin/sh\nbroken line\n"

// startAgent gives an agent that has accepted generation 1.
func startAgent(t *testing.T) *testAgent {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: users and namespaces")
	}
	folder, err := os.MkdirTemp("/tmp", "cpuos-agent-test-")
	must(t, err)
	etc := filepath.Join(folder, "etc")
	must(t, os.Mkdir(etc, 0o755))
	must(t, os.WriteFile(etc+"/passwd", []byte(testPasswd), 0o644))
	must(t, os.WriteFile(etc+"/group", []byte("root:x:0:\nuser:x:12345:\napp:x:12346:user\nextra:x:777:app,user\n"), 0o644))
	must(t, os.WriteFile(etc+"/environment", []byte("# image\nexport FROM_IMAGE=\"a b\"\nLANG=C\n"), 0o644))
	a := &testAgent{t: t, folder: folder + "/home", key: bytes.Repeat([]byte{1}, 32)}
	must(t, os.Mkdir(a.folder, 0o755))
	must(t, os.Chown(a.folder, 12345, 12345))
	must(t, os.Chmod(folder, 0o755))
	must(t, os.Mkdir(folder+"/full", 0o755))
	self, err := os.Executable()
	must(t, err)
	script := fmt.Sprintf(`mount -t tmpfs log /var/log && mount -t tmpfs -o size=1m,mode=1777 full %s/full &&
exec setpriv --bounding-set -sys_time %s --sandbox sbx --node-key %s --listen 127.0.0.1:0 --user-table %s`,
		folder, self, base64.StdEncoding.EncodeToString(nodeKey.Public().(ed25519.PublicKey)), etc)
	a.process = exec.Command("unshare", "--pid", "--uts", "--fork", "--mount", "--propagation", "slave", "--mount-proc", "sh", "-c", script)
	a.process.Env = append(os.Environ(), agentMark+"=1")
	a.process.Stderr = os.Stderr
	a.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := a.process.StdoutPipe()
	must(t, err)
	must(t, a.process.Start())
	t.Cleanup(func() {
		syscall.Kill(-a.process.Process.Pid, syscall.SIGKILL)
		a.process.Wait()
		os.RemoveAll(folder)
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	a.address = strings.TrimSpace(line)
	if status, body := a.identify(1, a.key, nil); status != 200 {
		t.Fatalf("identity: %d %s", status, body)
	}
	return a
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (a *testAgent) identify(generation int64, key []byte, change func(claim map[string]any)) (int, []byte) {
	at := time.Now().Unix() // an agent that may sets the clock by it: that of the machine, here
	claim := map[string]any{
		"sandbox": "sbx", "generation": generation, "expires_at": at + 600, "now": at, "hostname": "test",
		"session_key": base64.StdEncoding.EncodeToString(key),
	}
	if change != nil {
		change(claim)
	}
	statement, _ := json.Marshal(claim)
	signature := ed25519.Sign(nodeKey, append([]byte("cpuos-identity-v1\n"), statement...))
	body, _ := json.Marshal(map[string]any{
		"statement": statement, "signature": signature, "expected": a.expected, "incomplete": a.incomplete,
	})
	return a.call("POST", "/v1/identity", body)
}

func (a *testAgent) dial() *peer {
	a.t.Helper()
	connection, err := net.Dial("tcp", a.address)
	must(a.t, err)
	a.t.Cleanup(func() { connection.Close() })
	connection.SetDeadline(time.Now().Add(30 * time.Second))
	return &peer{TCPConn: connection.(*net.TCPConn), in: bufio.NewReader(connection), a: a}
}

// call makes one request on a connection of its own.
func (a *testAgent) call(method, target string, body any) (int, []byte) {
	a.t.Helper()
	p := a.dial()
	defer p.Close()
	p.request(method, target, body, "")
	return p.answer()
}

// want makes a call and demands its status and, for an error, its code.
func (a *testAgent) want(status int, code, method, target string, body any) []byte {
	a.t.Helper()
	got, data := a.call(method, target, body)
	var problem struct{ Code string }
	json.Unmarshal(data, &problem)
	if got != status || (status >= 400 && problem.Code != code) {
		a.t.Fatalf("%s %s: got %d %s, want %d %s", method, target, got, data, status, code)
	}
	return data
}

// peer is a hand-made client: what it sends is not tidied by a library.
type peer struct {
	*net.TCPConn
	in *bufio.Reader
	a  *testAgent
}

func (p *peer) request(method, target string, body any, more string) {
	p.a.t.Helper()
	data, ok := body.([]byte)
	if !ok && body != nil {
		data, _ = json.Marshal(body)
	}
	head := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: agent\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n%s\r\n",
		method, target, hex.EncodeToString(p.a.key), len(data), more)
	p.Write(append([]byte(head), data...))
}

func (p *peer) answer() (int, []byte) {
	p.a.t.Helper()
	response, err := http.ReadResponse(p.in, nil)
	if err != nil {
		return 0, []byte(err.Error())
	}
	if response.StatusCode == 101 {
		return 101, nil
	}
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return -response.StatusCode, data
	}
	return response.StatusCode, data
}

const upgradeLines = "Connection: Upgrade\r\nUpgrade: cpuos-frames/1\r\n"

var commandCount int

// stream starts a command and gives its id and stream; more is merged into the start.
func (a *testAgent) stream(command string, more map[string]any) (string, *peer) {
	a.t.Helper()
	commandCount++
	id := fmt.Sprintf("c%015d", commandCount)
	start := map[string]any{"command": command, "cwd": "/", "attach": true}
	for name, value := range more {
		start[name] = value
	}
	if start["argv"] != nil {
		delete(start, "command")
	}
	p := a.dial()
	p.request("POST", "/v1/commands?id="+id, start, upgradeLines)
	if status, body := p.answer(); status != 101 {
		a.t.Fatalf("start %q: %d %s", command, status, body)
	}
	return id, p
}

func (a *testAgent) attach(id string, stdout, stderr int) *peer {
	a.t.Helper()
	p := a.dial()
	p.request("POST", fmt.Sprintf("/v1/commands/%s/attach?stdout=%d&stderr=%d", id, stdout, stderr), nil, upgradeLines)
	if status, body := p.answer(); status != 101 {
		a.t.Fatalf("attach: %d %s", status, body)
	}
	return p
}

func (p *peer) send(kind byte, offset uint64, payload string) {
	p.Write(encodeFrame(kind, offset, []byte(payload)))
}

func (p *peer) frame() (frame, error) {
	var head [frameHeaderBytes]byte
	if _, err := io.ReadFull(p.in, head[:]); err != nil {
		return frame{}, err
	}
	f := frame{kind: head[0]}
	for _, b := range head[8:] {
		f.offset = f.offset<<8 | uint64(b)
	}
	f.payload = make([]byte, int(head[4])<<24|int(head[5])<<16|int(head[6])<<8|int(head[7]))
	_, err := io.ReadFull(p.in, f.payload)
	return f, err
}

type record struct {
	PID                int
	ID, Status, Reason string
	ExitCode           *int    `json:"exit_code"`
	Signal             *int    `json:"signal"`
	DurationS          float64 `json:"duration_s"`
	StdoutBytes        uint64  `json:"stdout_bytes"`
	StderrBytes        uint64  `json:"stderr_bytes"`
	StdinBytes         uint64  `json:"stdin_bytes"`
	OutputPath         *string `json:"output_path"`
}

type result struct {
	record
	out, err []byte
	took     time.Duration
}

// drain takes a stream to its end, acknowledging as it comes.
func (p *peer) drain() (r result) {
	p.a.t.Helper()
	begun := time.Now()
	for {
		f, err := p.frame()
		if err != nil {
			p.a.t.Fatalf("stream was cut: %v", err)
		}
		switch f.kind {
		case frameStdout:
			r.out = append(r.out, f.payload...)
		case frameStderr:
			r.err = append(r.err, f.payload...)
		case frameEnded:
			must(p.a.t, json.Unmarshal(f.payload, &r.record))
			r.took = time.Since(begun)
			p.Close()
			return r
		}
		if f.kind == frameStdout || f.kind == frameStderr {
			p.send(frameAck, 0, fmt.Sprintf(`{"stdout":%d,"stderr":%d}`, len(r.out), len(r.err)))
		}
	}
}

func (a *testAgent) run(command string, more map[string]any) result {
	a.t.Helper()
	id, p := a.stream(command, more)
	r := p.drain()
	a.want(200, "", "DELETE", "/v1/commands/"+id, nil)
	return r
}

// processes counts what matches in the agent's own PID namespace.
func (a *testAgent) processes(pattern string) string {
	return strings.TrimSpace(string(a.run("ps ax -o stat,args | grep -v grep | grep -c '"+pattern+"'", map[string]any{"user": "root"}).out))
}

func eventually(t *testing.T, what string, true func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if true() {
			return
		}
	}
	t.Fatalf("never came: %s", what)
}

func owner(t *testing.T, path string) (uid, gid uint32, mode uint32) {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Lstat(path, &st))
	return st.Uid, st.Gid, st.Mode & 0o7777
}
