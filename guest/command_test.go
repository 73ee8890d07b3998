package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

type with = map[string]any

func TestCommandRunsAsItsUser(t *testing.T) {
	a := startAgent(t)
	r := a.run("id -u; id -G; echo err >&2; echo $FROM_IMAGE $LANG $HOME $USER $GIVEN $CPUOS_COMMAND; pwd; umask; ulimit -c; cat /proc/self/cmdline | wc -c; exit 3",
		with{"env": with{"GIVEN": "é\n", "CPUOS_COMMAND": "x"}, "cwd": a.folder})
	want := "12345\n12345 777 12346\na b C /tmp user é c"
	if !strings.HasPrefix(string(r.out), want) || !strings.Contains(string(r.out), a.folder+"\n0022\n0\n") || string(r.err) != "err\n" {
		t.Errorf("%s%s", r.out, r.err)
	}
	if r.Status != "exited" || *r.ExitCode != 3 || r.Signal != nil || r.OutputPath != nil {
		t.Errorf("%+v", r.record)
	}
	if r := a.run("", with{"argv": []string{"printf", "%s|", "a b", "", "$x", "\"'"}}); string(r.out) != "a b||$x|\"'|" {
		t.Errorf("%q", r.out)
	}
	if r := a.run("id -u", with{"user": "root"}); string(r.out) != "0\n" {
		t.Errorf("%q", r.out)
	}
}

func TestStartErrorsStartNothing(t *testing.T) {
	a := startAgent(t)
	must(t, os.WriteFile(a.folder+"/plain", []byte("x"), 0o644))
	must(t, os.WriteFile(a.folder+"/script", []byte("#!/no/such/interpreter\n"), 0o755))
	must(t, os.WriteFile(a.folder+"/garbage", []byte("garbage"), 0o755))
	must(t, os.Mkdir(a.folder+"/closed", 0o700))
	start := func(status int, code string, more with) {
		t.Helper()
		body := with{"cwd": "/", "user": "user"}
		for name, value := range more {
			body[name] = value
		}
		a.want(status, code, "POST", "/v1/commands?id=aaaaaaaaaaaaaaaa", body)
	}
	argv := func(words ...string) with { return with{"argv": words} }
	start(404, "program_not_found", argv("no-such-program"))
	start(404, "program_not_found", argv("/no/such/program"))
	start(404, "program_not_found", argv(a.folder+"/script"))
	start(403, "program_not_executable", argv(a.folder+"/plain"))
	start(403, "program_not_executable", argv(a.folder+"/garbage"))
	start(403, "program_not_executable", argv("/tmp"))
	start(404, "program_not_found", with{"argv": []string{"ls"}, "env": with{"PATH": "/nowhere"}})
	start(422, "user_not_found", with{"command": "true", "user": "nobody-here"})
	start(404, "cwd_not_found", with{"command": "true", "cwd": "/no/such/folder"})
	start(404, "cwd_not_found", with{"command": "true", "cwd": a.folder + "/plain"})
	start(403, "file_permission_denied", with{"command": "true", "cwd": a.folder + "/closed"})
	start(400, "invalid", with{"command": "true", "argv": []string{"true"}})
	start(400, "invalid", with{})
	start(400, "invalid", with{"command": "true", "stdin": "maybe"})
	start(400, "invalid", with{"command": "true", "attach": true})
	start(400, "invalid", with{"command": "true", "pty": with{"cols": 0, "rows": 10}})
	start(400, "invalid", with{"command": strings.Repeat("x", 200<<10)})
	a.want(400, "invalid", "POST", "/v1/commands?id=UPPER", with{"command": "true"})
	if list := a.want(200, "", "GET", "/v1/commands", nil); string(list) != `{"commands":[]}` {
		t.Errorf("%s", list)
	}
	for _, call := range [][2]string{{"GET", ""}, {"DELETE", ""}, {"POST", "/kill"}} {
		a.want(404, "command_not_found", call[0], "/v1/commands/aaaaaaaaaaaaaaaa"+call[1], with{})
	}
}

func TestStartTwiceRunsOnce(t *testing.T) {
	a := startAgent(t)
	id, p := a.stream("echo once >> "+a.folder+"/count; sleep 0.3", nil)
	again := a.dial()
	again.request("POST", "/v1/commands?id="+id, with{"command": "echo once >> " + a.folder + "/count", "cwd": "/", "attach": true}, upgradeLines)
	if status, _ := again.answer(); status != 101 {
		t.Fatal(status)
	}
	if r := again.drain(); r.Status != "exited" {
		t.Errorf("%+v", r.record)
	}
	for err := error(nil); err == nil; { // the newer stream cut the older
		_, err = p.frame()
	}
	data, _ := os.ReadFile(a.folder + "/count")
	if string(data) != "once\n" {
		t.Errorf("%q", data)
	}
}

func TestStdin(t *testing.T) {
	a := startAgent(t)
	for _, command := range []string{"cat", "read v; echo done", "grep x"} {
		if r := a.run(command, with{"timeout_s": 5}); r.took > time.Second || r.Status != "exited" {
			t.Errorf("%s: %+v after %s", command, r.record, r.took)
		}
	}
	id, p := a.stream("sha256sum; exec cat", with{"stdin": "open"})
	data := bytes.Repeat([]byte("\x00\xffabc\n"), 60_000)
	for at := 0; at < len(data); at += 50_000 {
		part := data[at:min(at+50_000, len(data))]
		p.send(frameStdin, uint64(at), string(part))
		p.send(frameStdin, uint64(at), string(part)) // a repeat
	}
	p.send(frameStdinEnd, uint64(len(data)), "")
	want := a.run("sha256sum < "+write(t, a, "in", data), nil).out
	if r := p.drain(); !bytes.Equal(r.out, want) || r.StdinBytes != uint64(len(data)) {
		t.Errorf("%q, want %q", r.out, want)
	}
	a.want(200, "", "DELETE", "/v1/commands/"+id, nil)

	_, p = a.stream("exec 0<&-; echo closed; sleep 0.3", with{"stdin": "open"})
	p.send(frameStdin, 0, strings.Repeat("x", 300_000))
	if r := p.drain(); r.Status != "exited" || string(r.out) != "closed\n" {
		t.Errorf("%+v", r.record)
	}
}

func write(t *testing.T, a *testAgent, name string, data []byte) string {
	t.Helper()
	must(t, os.WriteFile(a.folder+"/"+name, data, 0o644))
	return a.folder + "/" + name
}

func TestRingHoldsUntilAcknowledged(t *testing.T) {
	a := startAgent(t)
	id, p := a.stream("seq 1 1000000; echo end >&2", nil)
	got := 0
	for got < 100_000 {
		f, err := p.frame()
		must(t, err)
		if f.kind == frameStdout {
			got += len(f.payload)
		}
	}
	p.Close() // cut without a word: nothing was acknowledged
	time.Sleep(300 * time.Millisecond)
	var state record
	must(t, json.Unmarshal(a.want(200, "", "GET", "/v1/commands/"+id, nil), &state))
	if state.Status != "running" || state.StdoutBytes != blockBytes {
		t.Errorf("the ring holds %d bytes, status %s", state.StdoutBytes, state.Status)
	}
	a.want(409, "invalid", "DELETE", "/v1/commands/"+id, nil)
	q := a.dial()
	q.request("POST", "/v1/commands/"+id+"/attach?stdout=99999999999&stderr=0", nil, upgradeLines)
	if status, _ := q.answer(); status != 400 {
		t.Errorf("an offset beyond the end: %d", status)
	}
	r := a.attach(id, 1000, 0).drain()
	var want bytes.Buffer
	for i := 1; i <= 1_000_000; i++ {
		fmt.Fprintln(&want, i)
	}
	if !bytes.Equal(r.out, want.Bytes()[1000:]) || string(r.err) != "end\n" {
		t.Errorf("%d bytes of %d after the cut", len(r.out), want.Len()-1000)
	}
	folder := *r.OutputPath
	copied := a.run("cat "+folder+"/stdout | sha256sum; ls "+folder+"; stat -c %a%u "+folder+" "+folder+"/stdout", nil).out
	direct := a.run("seq 1 1000000 | sha256sum", nil).out
	if !bytes.HasPrefix(copied, direct) || !strings.HasSuffix(string(copied), "stdout\n7550\n6440\n") {
		t.Errorf("copy: %s", copied)
	}
	late := a.attach(id, 10, 4) // its end is kept, what was acknowledged is not
	f, _ := late.frame()
	gap, _ := late.frame()
	end := late.drain()
	if f.kind != frameStarted || gap.kind != frameGap || !strings.Contains(string(gap.payload), `"from":10`) || *end.ExitCode != 0 {
		t.Errorf("%v %s %+v", f, gap.payload, end.record)
	}
	a.want(200, "", "DELETE", "/v1/commands/"+id, nil)
}

func TestOutputCopiesAreBounded(t *testing.T) {
	a := startAgent(t)
	for range keptFolders + 3 {
		a.run("head -c 70000 /dev/zero >&2", nil)
	}
	if n := string(a.run("ls "+logFolder+" | wc -l", nil).out); n != fmt.Sprintln(keptFolders) {
		t.Errorf("%s folders are kept", n)
	}
	for range 10 { // what the pump was reading as the program ended counts, too
		r := a.run("cat /dev/zero | head -c 3000000; exit 5", with{"user": "root", "env": with{"X": "1"}})
		if r.StdoutBytes != 3_000_000 || *r.ExitCode != 5 {
			t.Errorf("%+v", r.record)
		}
	}
	a.run("mount -t tmpfs -o size=64k small /var/log", with{"user": "root"})
	if r := a.run("head -c 5000000 /dev/zero", nil); r.OutputPath != nil || len(r.out) != 5_000_000 {
		t.Errorf("on a full disk: %+v", r.record)
	}
}

func TestTimeoutKillsTheTree(t *testing.T) {
	a := startAgent(t)
	r := a.run(`echo before; sleep 301 & setsid sleep 302 & (setsid sh -c 'sleep 303 & exec sleep 304' &) ; sleep 300`, with{"timeout_s": 0.5})
	if r.Status != "timed_out" || r.ExitCode != nil || string(r.out) != "before\n" || r.took > 2*time.Second {
		t.Errorf("%+v %q after %s", r.record, r.out, r.took)
	}
	if n := a.processes("[s]leep 30"); n != "0" {
		t.Errorf("%s processes are left", n)
	}
	if n := a.processes("^Z"); n != "0" {
		t.Errorf("%s zombies", n)
	}
	if r := a.run("exit 9", with{"timeout_s": 30}); r.Status != "exited" || *r.ExitCode != 9 {
		t.Errorf("%+v", r.record)
	}
}

func TestForkBombLoses(t *testing.T) {
	a := startAgent(t)
	for range 3 {
		r := a.run("ulimit -u 300; f() { f | f & }; f; sleep 60", with{"timeout_s": 0.5})
		if r.Status != "timed_out" || r.took > 4*time.Second {
			t.Errorf("%+v after %s", r.record, r.took)
		}
	}
	eventually(t, "the end of the bomb", func() bool { return a.processes("f()") == "0" && a.processes("^Z") == "0" })
}

func TestKill(t *testing.T) {
	a := startAgent(t)
	kill := func(id string, signal int) record {
		var r record
		must(t, json.Unmarshal(a.want(200, "", "POST", "/v1/commands/"+id+"/kill", with{"signal": signal, "reason": "asked"}), &r))
		return r
	}
	id, p := a.stream("sleep 311 & (setsid sleep 312 &); sleep 313", nil)
	time.Sleep(100 * time.Millisecond)
	if r := kill(id, 9); r.Status != "killed" || *r.Signal != 9 || r.Reason != "asked" {
		t.Errorf("%+v", r)
	}
	p.drain()
	if n := a.processes("[s]leep 31"); n != "0" {
		t.Errorf("%s processes are left", n)
	}
	id, p = a.stream(`trap "echo caught; exit 4" TERM; echo ready; while :; do sleep 0.05; done`, nil)
	for f := (frame{}); f.kind != frameStdout; {
		f, _ = p.frame()
	}
	kill(id, 15)
	if r := p.drain(); r.Status != "exited" || *r.ExitCode != 4 {
		t.Errorf("%+v", r.record)
	}
	if r := a.run("kill -9 $$", nil); r.Status != "signalled" || *r.Signal != 9 || r.Reason != "" {
		t.Errorf("%+v", r.record)
	}
	id, p = a.stream("sleep 60", nil)
	p.send(frameKill, 0, `{"signal": 9, "reason": "by frame"}`)
	if r := p.drain(); r.Status != "killed" || r.Reason != "by frame" {
		t.Errorf("%+v", r.record)
	}
	id, p = a.stream("(sleep 321 > /dev/null 2>&1 &)", nil) // what an ended command left
	p.drain()
	kill(id, 9)
	if n := a.processes("[s]leep 321"); n != "0" {
		t.Errorf("%s processes are left", n)
	}
	a.want(400, "invalid", "POST", "/v1/commands/"+id+"/kill", with{"signal": 0})
}

func TestEndWithAChildThatHoldsTheOutput(t *testing.T) {
	a := startAgent(t)
	if r := a.run("sleep 30 & echo a", nil); string(r.out) != "a\n" || r.took > time.Second || *r.ExitCode != 0 {
		t.Errorf("%+v after %s", r.record, r.took)
	}
	eventually(t, "output soon after the end", func() bool { // soon: a busy machine may need more than the quiet time
		return string(a.run("(sleep 0.03; echo late) & echo a", nil).out) == "a\nlate\n"
	})
	if r := a.run("yes & echo a", with{"timeout_s": 20}); r.took > 3*time.Second || *r.ExitCode != 0 {
		t.Errorf("%+v after %s", r.record, r.took)
	}
	if n := a.processes("[y]es"); n != "1" {
		t.Errorf("the child was stopped: %s", n)
	}
}

func TestOrphansLeaveNoZombies(t *testing.T) {
	a := startAgent(t)
	a.run("for i in $(seq 300); do sh -c '(sleep 0.02 &)'; done", nil)
	eventually(t, "no zombies", func() bool { return a.processes("^Z") == "0" })
	for range 200 { // ends that race the fork's return
		if r := a.run("", with{"argv": []string{"true"}}); *r.ExitCode != 0 {
			t.Fatalf("%+v", r.record)
		}
	}
	if n := a.processes("^Z"); n != "0" {
		t.Errorf("%s zombies", n)
	}
}

func TestTerminal(t *testing.T) {
	a := startAgent(t)
	_, p := a.stream("tty; stty size; echo $TERM; stat -c %u $(tty); read x; echo got $x; stty size; exec sleep 60", with{"pty": with{"cols": 100, "rows": 30}})
	p.send(frameResize, 0, `{"cols":77,"rows":22}`)
	time.Sleep(100 * time.Millisecond)
	p.send(frameResize, 0, `{"cols":66,"rows":11}`)
	p.send(frameStdin, 0, "abc\n")
	time.Sleep(200 * time.Millisecond)
	p.send(frameKill, 0, `{"signal":2,"reason":"Ctrl-C"}`)
	r := p.drain()
	for _, part := range []string{"/dev/pts/", "xterm-256color\r\n", "12345\r\n", "got abc\r\n11 66\r\n"} {
		if !strings.Contains(string(r.out), part) {
			t.Errorf("%q lacks %q", r.out, part)
		}
	}
	if r.Status != "killed" || *r.Signal != 2 {
		t.Errorf("%+v", r.record)
	}
	_, p = a.stream("cat", with{"pty": with{"cols": 10, "rows": 10}})
	p.send(frameStdinEnd, 0, "")
	if r := p.drain(); r.Status != "exited" {
		t.Errorf("%+v %d %q", r.record, *r.Signal, r.out)
	}
	if r := a.run("sleep 50 & head -c 300000 /dev/zero | tr '\\0' A", with{"pty": with{"cols": 10, "rows": 10}}); len(r.out) != 300_000 {
		t.Errorf("%d bytes by a terminal", len(r.out))
	}
}

func TestFramesOutOfContractEndTheStream(t *testing.T) {
	a := startAgent(t)
	for _, bad := range []string{"\x01", "\x13\x01", "\x14"} {
		id, p := a.stream("sleep 60", nil)
		p.Write([]byte(bad + strings.Repeat("\x00", 30)))
		for err := error(nil); err == nil; {
			_, err = p.frame()
		}
		a.want(200, "", "POST", "/v1/commands/"+id+"/kill", with{})
		a.attach(id, 0, 0).drain()
	}
}

// ignoredSignals finds the set of them in the text of a /proc/PID/status.
func ignoredSignals(t *testing.T, status []byte) (set uint64) {
	t.Helper()
	_, rest, _ := strings.Cut(string(status), "SigIgn:")
	if _, err := fmt.Sscanf(rest, "%x", &set); err != nil {
		t.Fatalf("no SigIgn in %q: %v", status, err)
	}
	return set
}
func TestSignalsDoNotEndTheAgent(t *testing.T) {
	a := startAgent(t)
	for _, name := range []string{"TERM", "INT", "HUP", "QUIT", "SEGV", "ABRT", "USR1", "PIPE", "BUS", "TSTP", "CHLD", "URG", "PROF", "40", "64", "KILL"} {
		a.run("kill -"+name+" 1", with{"user": "root"})
	}
	// Who started this test may ignore signals itself (make does, by posix_spawn): no more than that is inherited.
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	r := a.run("kill 1; cat /proc/self/status", nil)
	if more := ignoredSignals(t, r.out) &^ ignoredSignals(t, own); more != 0 || !strings.Contains(string(r.out), "SigBlk:\t0000000000000000") {
		t.Errorf("programs inherit signal settings: %x ignored in\n%s", more, r.out)
	}
	a.want(200, "", "GET", "/v1/hello", nil)
}
