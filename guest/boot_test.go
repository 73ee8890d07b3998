package main

import (
	"bufio"
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// A create waits until the agent has said who it is: nothing that can come later is done before, and all of it before
// the next call is served.
func TestItSaysWhoItIsBeforeItMakesItsThreads(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	key := base64.StdEncoding.EncodeToString(nodeKey.Public().(ed25519.PublicKey))
	process := exec.Command(self, "--sandbox", "sbx", "--node-key", key, "--listen", "127.0.0.1:0", "--user-table", t.TempDir())
	process.Env = append(os.Environ(), agentMark+"=1")
	out, err := process.StdoutPipe()
	must(t, err)
	must(t, process.Start())
	t.Cleanup(func() {
		process.Process.Kill()
		process.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	a := &testAgent{t: t, address: strings.TrimSpace(line), key: bytes.Repeat([]byte{1}, 32)}
	if threads := threadsOf(t, process.Process.Pid); threads >= reservedThreads {
		t.Fatalf("%d threads before anybody asked", threads)
	}
	if status, body := a.identify(1, a.key, nil); status != 200 {
		t.Fatalf("identity: %d %s", status, body)
	}
	a.want(200, "", "GET", "/v1/hello", nil)
	if threads := threadsOf(t, process.Process.Pid); threads < reservedThreads {
		t.Fatalf("%d threads when a call was served", threads)
	}
}

func threadsOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	count, err := strconv.Atoi(regexp.MustCompile(`Threads:\s*(\d+)`).FindStringSubmatch(string(text))[1])
	must(t, err)
	return count
}
