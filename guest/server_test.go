package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestIdentityIsTheNodes(t *testing.T) {
	a := startAgent(t)
	right := a.key
	a.key = []byte("wrong")
	for _, target := range []string{"/v1/hello", "/v1/commands", "/v1/files?path=/etc/passwd", "/nowhere"} {
		a.want(401, "identity_required", "GET", target, nil)
	}
	other := make([]byte, 32)
	for name, change := range map[string]func(map[string]any){
		"of another sandbox": func(c map[string]any) { c["sandbox"] = "other"; c["generation"] = 5 },
		"expired":            func(c map[string]any) { c["expires_at"] = 1e9; c["generation"] = 5 },
		"without a key":      func(c map[string]any) { c["session_key"] = ""; c["generation"] = 5 },
		"older":              func(c map[string]any) { c["generation"] = 0 },
		"other key":          func(c map[string]any) {},
	} {
		if status, body := a.identify(1, other, change); status != 401 || !strings.Contains(string(body), "identity_refused") {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	a.want(401, "identity_refused", "POST", "/v1/identity", map[string]any{"statement": "e30=", "signature": "AAAA"})
	a.want(400, "invalid", "POST", "/v1/identity", []byte("no json"))
	if status, _ := a.identify(1, right, nil); status != 200 {
		t.Error("a repeat was refused")
	}
	a.key = right
	_, old := a.stream("sleep 60", nil)
	if status, _ := a.identify(2, other, nil); status != 200 {
		t.Fatal("a newer generation was refused")
	}
	a.want(401, "identity_required", "GET", "/v1/hello", nil)
	for {
		if _, err := old.frame(); err != nil {
			break // whoever spoke for the old generation is cut
		}
	}
	a.key = other
	var hello struct {
		Contract, Generation, Commands int
		Sandbox                        string
	}
	must(t, json.Unmarshal(a.want(200, "", "GET", "/v1/hello", nil), &hello))
	if hello.Contract != 1 || hello.Generation != 2 || hello.Sandbox != "sbx" || hello.Commands != 1 {
		t.Errorf("%+v", hello)
	}
}

func TestHeadsOutOfContract(t *testing.T) {
	a := startAgent(t)
	for name, head := range map[string]string{
		"no request":       "hello\r\n\r\n",
		"two lengths":      "PUT /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
		"negative length":  "PUT /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
		"other coding":     "PUT /v1/files HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
		"bad header":       "GET /v1/hello HTTP/1.1\r\nno colon\r\n\r\n",
		"too large":        "GET /v1/hello HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 20<<10) + "\r\n\r\n",
		"too many headers": "GET /v1/hello HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: y\r\n", 4000) + "\r\n",
		"endless line":     strings.Repeat("x", 20<<10),
	} {
		p := a.dial()
		fmt.Fprint(p, head)
		if status, body := p.answer(); status != 400 || !strings.Contains(string(body), `"invalid"`) {
			t.Errorf("%s: %d %s", name, status, body)
		}
		p.Close()
	}
	a.want(404, "not_found", "GET", "/v1/nothing", nil)
	a.want(404, "not_found", "PATCH", "/v1/hello", nil)
	a.want(400, "invalid", "POST", "/v1/identity", []byte(strings.Repeat(" ", jsonBytes+1)))
}

func TestKeepAliveAndChunks(t *testing.T) {
	a := startAgent(t)
	p := a.dial()
	for range 3 {
		p.request("GET", "/v1/hello", nil, "")
		if status, _ := p.answer(); status != 200 {
			t.Fatal(status)
		}
	}
	head := "PUT /v1/files?path=" + a.folder + "/chunked HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + strings.Repeat("01", 32)
	fmt.Fprint(p, head+"\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n")
	if line, _ := p.in.ReadString('\n'); !strings.Contains(line, "100") {
		t.Fatal(line)
	}
	p.in.ReadString('\n')
	if status, body := p.answer(); status != 200 || !strings.Contains(string(body), `"size":6`) {
		t.Fatalf("%d %s", status, body)
	}
	p.request("GET", "/v1/hello", nil, "")
	if status, _ := p.answer(); status != 200 {
		t.Fatal("the connection was not kept after chunks")
	}
}
