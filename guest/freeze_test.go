package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	nonce  = "0123456789abcdef0123456789abcdef"
	nonce2 = "fedcba9876543210fedcba9876543210"
)

type frozenFacts struct {
	Processes int
	Listeners []struct {
		Port    int
		Address string
	}
	Commands []string
}

type thawedFacts struct {
	Sandbox                 string
	Generation, Incarnation int
	Frozen                  *string
	Commands                int
	Thawed                  struct {
		Continued        int
		Reseeded, Failed []string
		Missing          []string
	}
}

func (a *testAgent) freeze(freeze string) (facts frozenFacts) {
	a.t.Helper()
	must(a.t, json.Unmarshal(a.want(200, "", "POST", "/v1/freeze", with{"freeze": freeze}), &facts))
	return facts
}

// thawAs shows the statement that ends a freeze, and speaks with its key from then on.
func (a *testAgent) thawAs(status int, freeze string, change with) (facts thawedFacts) {
	a.t.Helper()
	key := bytes.Repeat([]byte{9}, 32)
	got, body := a.identify(1, key, func(claim map[string]any) {
		claim["incarnation"], claim["thaw"], claim["from"] = 1, freeze, "sbx"
		for name, value := range change {
			claim[name] = value
		}
	})
	if got != status {
		a.t.Fatalf("thaw: %d %s, want %d", got, body, status)
	}
	if json.Unmarshal(body, &facts); status == 200 {
		a.key = key
	}
	return facts
}

// counts is a program that goes on writing, and says whether it does.
func (a *testAgent) counting(name string) func() bool {
	size := func() int64 {
		file, err := os.Stat(a.folder + "/" + name)
		if err != nil {
			return 0
		}
		return file.Size()
	}
	return func() bool {
		before := size()
		time.Sleep(80 * time.Millisecond)
		return size() > before
	}
}

func (a *testAgent) tick(name string) string {
	return "while :; do echo >> " + a.folder + "/" + name + "; sleep 0.005; done"
}

func TestFreezeStopsAllAndThawLetsGoOn(t *testing.T) {
	a := startAgent(t)
	id, stream := a.stream(a.tick("one")+" & "+a.tick("two"), nil)
	one, two := a.counting("one"), a.counting("two")
	eventually(t, "both count", func() bool { return one() && two() })
	server, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer server.Close()
	facts := a.freeze(nonce)
	if one() || two() {
		t.Fatal("something runs on")
	}
	if facts.Processes < 2 || len(facts.Commands) != 1 || facts.Commands[0] != id {
		t.Errorf("%+v", facts)
	}
	found := false
	for _, l := range facts.Listeners {
		found = found || l.Address == "127.0.0.1" && strconv.Itoa(l.Port) == strings.TrimPrefix(server.Addr().String(), "127.0.0.1:")
		if fmt.Sprintf("%s:%d", l.Address, l.Port) == a.address {
			t.Error("the agent's own port is told")
		}
	}
	if !found {
		t.Errorf("%v lacks %v", facts.Listeners, server.Addr())
	}
	for {
		if _, err := stream.frame(); err != nil {
			break // the stream is cut
		}
	}
	if again := a.freeze(nonce); fmt.Sprint(again) != fmt.Sprint(facts) {
		t.Errorf("a repeat tells something else: %+v", again)
	}
	a.want(409, "frozen", "POST", "/v1/freeze", with{"freeze": nonce2})
	a.want(409, "frozen", "POST", "/v1/commands?id=aaaaaaaaaaaaaaaa", with{"command": "true", "cwd": "/"})
	a.want(409, "frozen", "POST", "/v1/commands/"+id+"/kill", with{})
	a.want(409, "frozen", "GET", "/v1/commands", nil)
	if hello := a.want(200, "", "GET", "/v1/hello", nil); !strings.Contains(string(hello), `"frozen":"`+nonce+`"`) {
		t.Errorf("%s", hello)
	}
	told := a.thawAs(200, nonce, nil)
	if told.Incarnation != 1 || told.Frozen != nil || told.Commands != 1 || told.Thawed.Continued != facts.Processes {
		t.Errorf("%+v, stopped %d", told, facts.Processes)
	}
	eventually(t, "both count again", func() bool { return one() && two() })
	a.attach(id, 0, 0)
	a.want(200, "", "POST", "/v1/commands/"+id+"/kill", with{})
}

func TestThawOfTheHost(t *testing.T) {
	a := startAgent(t)
	a.stream(a.tick("one"), nil)
	one := a.counting("one")
	if continued := a.want(200, "", "POST", "/v1/thaw", with{"freeze": nonce}); string(continued) != `{"continued":0}` {
		t.Errorf("%s", continued)
	}
	eventually(t, "it counts", one)
	a.freeze(nonce)
	a.want(409, "frozen", "POST", "/v1/thaw", with{"freeze": nonce2})
	a.want(400, "invalid", "POST", "/v1/thaw", with{"freeze": "x"})
	if status, body := a.identify(1, a.key, nil); status != 200 || !strings.Contains(string(body), nonce) || one() {
		t.Fatalf("a repeat of the identity: %d %s", status, body)
	}
	a.want(200, "", "POST", "/v1/thaw", with{"freeze": nonce})
	eventually(t, "it counts again", one)
	a.freeze(nonce2)
	a.thawAs(200, nonce2, nil)
}

func TestOnlyTheRightStatementThaws(t *testing.T) {
	a := startAgent(t)
	a.stream(a.tick("one"), nil)
	one := a.counting("one")
	eventually(t, "it counts", one)
	a.thawAs(401, nonce, nil) // not frozen
	a.thawAs(401, nonce, with{"sandbox": "copy"})
	a.freeze(nonce)
	for name, change := range map[string]with{
		"without a thaw":    {"thaw": ""},
		"of another freeze": {"thaw": nonce2},
		"from another":      {"from": "other"},
		"from none":         {"from": ""},
		"not newer":         {"incarnation": 0},
		"older":             {"generation": 0, "incarnation": 7},
		"expired":           {"expires_at": 1e9},
		"without a key":     {"session_key": ""},
		"newer, no thaw":    {"generation": 2, "thaw": ""},
	} {
		a.thawAs(401, nonce, change)
		if one() {
			t.Fatal("goes on by a statement ", name)
		}
	}
	old := a.key
	a.thawAs(200, nonce, nil)
	a.thawAs(200, nonce, nil) // a repeat
	a.thawAs(200, nonce, with{"thaw": ""})
	a.thawAs(401, nonce, with{"thaw": nonce2})
	eventually(t, "it counts again", one)
	key := a.key
	a.key = old
	a.want(401, "identity_required", "GET", "/v1/hello", nil)
	a.key = key
	a.freeze(nonce2)
	a.thawAs(401, nonce, with{"incarnation": 2}) // the thaw of the freeze before
	if one() {
		t.Fatal("a replayed thaw works")
	}
	a.thawAs(200, nonce2, with{"incarnation": 2})
}

func TestGoesOnWholeUnlessAskedOtherwise(t *testing.T) {
	a := startAgent(t)
	a.stream(a.tick("one"), nil)
	id, _ := a.stream("exec sleep 4321.25", nil)
	one := a.counting("one")
	eventually(t, "both run", func() bool { return one() && a.processes("[s]leep 4321.25") == "1" })
	server, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer server.Close()
	var told with
	must(t, json.Unmarshal(a.want(200, "", "POST", "/v1/freeze", with{"freeze": nonce}), &told))
	a.expected = told
	must(t, exec.Command("pkill", "-KILL", "-f", "^sleep 4321.25").Run())
	server.Close()
	var refused struct {
		Code    string
		Missing []string
	}
	eventually(t, "what is gone is told", func() bool {
		status, body := a.identify(1, bytes.Repeat([]byte{9}, 32), func(claim map[string]any) {
			claim["incarnation"], claim["thaw"], claim["from"] = 1, nonce, "sbx"
		})
		must(t, json.Unmarshal(body, &refused))
		return status == 409 && refused.Code == "restore_incomplete" && len(refused.Missing) == 3
	})
	text := strings.Join(refused.Missing, ", ")
	if !strings.Contains(text, "(sleep), command "+id+", listener on "+server.Addr().String()) {
		t.Error(text)
	}
	if one() {
		t.Error("it goes on though not all came back")
	}
	a.incomplete = true
	if facts := a.thawAs(200, nonce, nil); strings.Join(facts.Thawed.Missing, ", ") != text {
		t.Errorf("%+v", facts.Thawed)
	}
	eventually(t, "what is there goes on", one)
	if again := a.thawAs(200, nonce, nil); strings.Join(again.Thawed.Missing, ", ") != text {
		t.Errorf("a repeat tells something else: %+v", again.Thawed)
	}
	a.incomplete = false
	id, _ = a.stream("true", nil)
	eventually(t, "it has ended", func() bool {
		return strings.Contains(string(a.want(200, "", "GET", "/v1/commands/"+id, nil)), `"status":"exited"`)
	})
	must(t, json.Unmarshal(a.want(200, "", "POST", "/v1/freeze", with{"freeze": nonce2}), &a.expected))
	a.expected["commands"] = append(a.expected["commands"].([]any), id) // told while it ended
	if facts := a.thawAs(200, nonce2, with{"incarnation": 2}); len(facts.Thawed.Missing) != 0 {
		t.Errorf("%+v", facts.Thawed)
	}
}

func TestStoppedBeforeStaysStopped(t *testing.T) {
	a := startAgent(t)
	a.stream(a.tick("running"), nil)
	a.run("("+a.tick("stopped")+") </dev/null >/dev/null 2>&1 & disown; echo $! > "+a.folder+"/pid; sleep 0.3; kill -STOP $!", nil)
	running, stopped := a.counting("running"), a.counting("stopped")
	eventually(t, "the one counts, the other does not", func() bool { return running() && !stopped() })
	a.freeze(nonce)
	a.thawAs(200, nonce, nil)
	eventually(t, "it counts again", running)
	if stopped() {
		t.Error("what was stopped goes on")
	}
	a.run("kill -CONT $(cat "+a.folder+"/pid)", nil)
	eventually(t, "it can be continued", stopped)
}

// A shell tells of jobs that stop; of a freeze it must see nothing.
func TestAShellSeesNothing(t *testing.T) {
	a := startAgent(t)
	id, p := a.stream("", with{"argv": []string{"/bin/bash", "--norc", "-i"}, "pty": with{"cols": 80, "rows": 24}, "stdin": "open", "env": with{"PS1": "> "}})
	p.send(frameStdin, 0, "sleep 61 & sleep 62\n")
	eventually(t, "the jobs run", func() bool { return a.processes("[s]leep 6[12]") == "2" })
	for incarnation := 1; incarnation <= 5; incarnation++ {
		freeze := fmt.Sprintf("%032x", incarnation)
		a.freeze(freeze)
		a.thawAs(200, freeze, with{"incarnation": incarnation})
	}
	p = a.attach(id, 0, 0)
	p.send(frameKill, 0, `{"signal":2}`) // Ctrl-C ends the one in the foreground
	seen := ""
	for !strings.HasSuffix(seen, "\r\n\x1b[?2004h> ") {
		f, err := p.frame()
		if err != nil {
			t.Fatalf("%v after %q; %s", err, seen, a.processes("."))
		}
		if f.kind == frameStdout {
			seen += string(f.payload)
		}
	}
	p.send(frameStdin, uint64(len("sleep 61 & sleep 62\n")), "jobs\nkill %1\nwait\nexit 7\n")
	r := p.drain()
	out := seen + string(r.out)
	if strings.Contains(out, "Stopped") || !strings.Contains(out, "Running") || *r.ExitCode != 7 {
		t.Errorf("%q %+v", out, r.record)
	}
}

func TestOutputAndInputGoOnWithoutALostByte(t *testing.T) {
	a := startAgent(t)
	id, p := a.stream("n=0; while read -r line; do echo $line; done", with{"stdin": "open"})
	text, sent, got := []byte(nil), 0, []byte(nil)
	for i := range 20000 {
		text = fmt.Appendf(text, "%d\n", i)
	}
	for incarnation := 1; len(got) < len(text); incarnation++ {
		if sent < len(text) {
			next := min(sent+9000, len(text))
			p.send(frameStdin, uint64(sent), string(text[sent:next]))
			sent = next
		}
		for range 3 {
			if f, err := p.frame(); err == nil && f.kind == frameStdout {
				got = append(got, f.payload[uint64(len(got))-f.offset:]...)
			}
		}
		if sent == len(text) {
			continue
		}
		freeze := fmt.Sprintf("%032x", incarnation)
		a.freeze(freeze)
		a.thawAs(200, freeze, with{"incarnation": incarnation})
		p = a.attach(id, len(got), 0)
		f, err := p.frame()
		var started struct{ Stdin int }
		if must(t, err); f.kind != frameStarted {
			t.Fatal(f)
		}
		must(t, json.Unmarshal(f.payload, &started))
		sent = started.Stdin
	}
	if !bytes.Equal(got, text) {
		t.Errorf("%d bytes of %d", len(got), len(text))
	}
}

func TestAnotherSandboxForgets(t *testing.T) {
	a := startAgent(t)
	etc := strings.TrimSuffix(a.folder, "home") + "etc"
	must(t, os.MkdirAll(etc+"/cpuos/reseed.d", 0o755))
	must(t, os.MkdirAll(etc+"/ssh", 0o755))
	must(t, os.WriteFile(etc+"/machine-id", []byte("old\n"), 0o444))
	must(t, os.WriteFile(etc+"/ssh/ssh_host_rsa_key", []byte("old\n"), 0o600))
	script := func(name, text string, mode os.FileMode) {
		must(t, os.WriteFile(etc+"/cpuos/reseed.d/"+name, []byte("#!/bin/sh\n"+text), mode))
	}
	script("10-says", "echo $CPUOS_SANDBOX $(id -u) > "+a.folder+"/said; cat "+etc+"/machine-id >> "+a.folder+"/said", 0o755)
	script("20-fails", "exit 1", 0o755)
	script("30-not", "echo no > "+a.folder+"/not", 0o644)
	script("90-hangs", "sleep 100", 0o755)
	must(t, os.MkdirAll(etc+"/cpuos/reseed.d/folder", 0o755))
	id, _ := a.stream(a.tick("one")+" & yes", with{"timeout_s": 1})
	one := a.counting("one")
	eventually(t, "it counts", one)
	a.freeze(nonce)
	began := time.Now()
	told := a.thawAs(200, nonce, with{"sandbox": "copy", "incarnation": 0})
	if told.Sandbox != "copy" || told.Commands != 0 || fmt.Sprint(told.Thawed.Failed) != "[20-fails 90-hangs]" ||
		fmt.Sprint(told.Thawed.Reseeded) != "[10-says]" {
		t.Errorf("%+v", told)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("took %s", took)
	}
	if said, _ := os.ReadFile(a.folder + "/said"); !strings.HasPrefix(string(said), "copy 0\n") || len(said) != 7+33 || strings.Contains(string(said), "old") {
		t.Errorf("%q", said)
	}
	eventually(t, "a new ssh host key, where there is a program for it", func() bool {
		key, err := os.ReadFile(etc + "/ssh/ssh_host_rsa_key")
		_, lacks := os.Stat("/usr/bin/ssh-keygen")
		return err == nil && string(key) != "old\n" || lacks != nil && err != nil
	})
	if _, err := os.Stat(a.folder + "/not"); err == nil {
		t.Error("a file that is no program was run")
	}
	eventually(t, "it counts again", one)
	a.want(404, "command_not_found", "GET", "/v1/commands/"+id, nil)
	if list := a.want(200, "", "GET", "/v1/commands", nil); string(list) != `{"commands":[]}` {
		t.Errorf("%s", list)
	}
	time.Sleep(1200 * time.Millisecond)
	if yes := a.processes("^[RS][^ ]* *[y]es$"); yes != "1" {
		t.Error("the time limit of a command that was forgotten still counts")
	}
	eventually(t, "it counts still", one)
	a.freeze(nonce2)
	a.thawAs(401, nonce2, with{"sandbox": "copy", "incarnation": 1}) // from sbx, which this is not any more
	a.thawAs(200, nonce2, with{"sandbox": "copy", "incarnation": 1, "from": "copy"})
}

func TestTimeLimitsStandStill(t *testing.T) {
	a := startAgent(t)
	id, _ := a.stream("sleep 60", with{"timeout_s": 0.6})
	a.freeze(nonce)
	time.Sleep(900 * time.Millisecond)
	a.thawAs(200, nonce, nil)
	r := a.attach(id, 0, 0).drain()
	if r.Status != "timed_out" || r.took < 200*time.Millisecond {
		t.Errorf("%+v after %s", r.record, r.took)
	}
	id, _ = a.stream("exit 0", with{"timeout_s": 0.2})
	a.attach(id, 0, 0).drain()
	a.freeze(nonce2)
	a.thawAs(200, nonce2, with{"incarnation": 2})
}

func TestAForkBombIsFrozen(t *testing.T) {
	a := startAgent(t)
	_, p := a.stream("ulimit -u 150; f() { f & f & }; while :; do f; done", with{"user": "app"})
	defer p.Close()
	time.Sleep(300 * time.Millisecond)
	facts := a.freeze(nonce)
	if facts.Processes < 20 {
		t.Errorf("%+v", facts)
	}
	told := a.thawAs(200, nonce, nil)
	if told.Thawed.Continued < 20 {
		t.Errorf("%+v", told)
	}
	a.want(200, "", "POST", "/v1/commands/"+facts.Commands[0]+"/kill", with{})
}

func TestCallsUnderWayAreEnded(t *testing.T) {
	a := startAgent(t)
	half := a.dial()
	fmt.Fprintf(half, "PUT /v1/files?path=%s/half HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %x\r\nContent-Length: 100\r\n\r\nhalf", a.folder, a.key)
	watch := a.dial()
	watch.request("GET", "/v1/files/watch?path="+a.folder, nil, upgradeLines)
	if status, _ := watch.answer(); status != 101 {
		t.Fatal(status)
	}
	time.Sleep(50 * time.Millisecond)
	a.freeze(nonce)
	if entries, _ := os.ReadDir(a.folder); len(entries) > 0 {
		t.Errorf("a part of a file is left: %v", entries)
	}
	for err := error(nil); err == nil; {
		_, err = watch.frame() // the watch ends
	}
	a.thawAs(200, nonce, nil)
	a.want(200, "", "GET", "/v1/files/stat?path="+a.folder, nil)
}
