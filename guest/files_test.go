package main

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func percent(path string) string { return strings.ReplaceAll(url.QueryEscape(path), "+", "%20") }

func at(path string, more ...string) string {
	return "path=" + percent(path) + strings.Join(append([]string{""}, more...), "&")
}

func (a *testAgent) info(data []byte) (i fileInfo) {
	a.t.Helper()
	must(a.t, json.Unmarshal(data, &i))
	return i
}

func TestBytesAreKept(t *testing.T) {
	a := startAgent(t)
	for _, n := range []int{0, 1, 4095, 4096, 65535, 65536, 1<<20 - 1, 1 << 20, 3<<20 + 1, 40 << 20} {
		data := make([]byte, n)
		rand.Read(data)
		path := fmt.Sprintf("%s/deep/er/%d", a.folder, n)
		if i := a.info(a.want(200, "", "PUT", "/v1/files?"+at(path), data)); i.Size != int64(n) || i.Kind != "file" || i.User != "user" || i.Mode != 0o644 {
			t.Errorf("%+v", i)
		}
		if got := a.want(200, "", "GET", "/v1/files?"+at(path), nil); !bytes.Equal(got, data) {
			t.Errorf("%d bytes came back as %d", n, len(got))
		}
		if n > 100 {
			if got := a.want(200, "", "GET", "/v1/files?"+at(path, "offset=50", "length=20"), nil); !bytes.Equal(got, data[50:70]) {
				t.Errorf("range: %d bytes", len(got))
			}
		}
	}
	if got := a.want(200, "", "GET", "/v1/files?"+at(a.folder+"/deep/er/4096", "offset=9999"), nil); len(got) != 0 {
		t.Errorf("beyond the end: %d bytes", len(got))
	}
	if got := a.want(200, "", "GET", "/v1/files?path=/proc/version", nil); !strings.HasPrefix(string(got), "Linux") {
		t.Errorf("%q", got)
	}
	sparse, _ := os.Create(a.folder + "/sparse")
	must(t, sparse.Truncate(4<<30+1))
	sparse.Close()
	if i := a.info(a.want(200, "", "GET", "/v1/files/stat?"+at(a.folder+"/sparse"), nil)); i.Size != 4<<30+1 {
		t.Errorf("%+v", i)
	}
	if got := a.want(200, "", "GET", "/v1/files?"+at(a.folder+"/sparse", "offset=4294967290"), nil); len(got) != 7 {
		t.Errorf("%d bytes beyond 4 GiB", len(got))
	}
}

func TestNames(t *testing.T) {
	a := startAgent(t)
	names := []string{"🤣.txt", "报告 1.pdf", "a\"b'.txt", "-rf", "new\nline", "\u00e9", "e\u0301", strings.Repeat("x", 255), "%2e%2e", "a;b?c#d", "a+b &=", "bad\xff\xfename"}
	for _, name := range names {
		path := a.folder + "/" + name
		a.want(200, "", "PUT", "/v1/files?"+at(path), []byte(name))
		if data, err := os.ReadFile(path); err != nil || string(data) != name {
			t.Errorf("%q: %v", name, err)
		}
		if got := a.want(200, "", "GET", "/v1/files?"+at(path), nil); string(got) != name {
			t.Errorf("%q came back as %q", name, got)
		}
		a.want(200, "", "POST", "/v1/files/move?"+at(path, "to="+percent(a.folder+"/moved")), nil)
		a.want(200, "", "POST", "/v1/files/move?"+at(a.folder+"/moved", "to="+percent(path)), nil)
	}
	var list struct{ Entries []fileInfo }
	must(t, json.Unmarshal(a.want(200, "", "GET", "/v1/files/list?"+at(a.folder), nil), &list))
	seen := map[string]bool{}
	for _, i := range list.Entries {
		path := i.Path
		if i.Raw != nil {
			raw, _ := base64.StdEncoding.DecodeString(*i.Raw)
			path = string(raw)
		}
		seen[filepath.Base(path)] = true
	}
	for _, name := range names {
		if !seen[name] {
			t.Errorf("%q is not listed", name)
		}
		a.want(200, "", "DELETE", "/v1/files?"+at(a.folder+"/"+name), nil)
	}
	for _, call := range []string{"GET", "PUT", "DELETE"} {
		a.want(422, "file_name_invalid", call, "/v1/files?"+at(a.folder+"/"+strings.Repeat("x", 256)), nil)
		a.want(422, "file_name_invalid", call, "/v1/files?path=%00", nil)
		a.want(422, "file_name_invalid", call, "/v1/files", nil)
		a.want(422, "user_not_found", call, "/v1/files?path=/x&user=nobody-here", nil)
	}
}

func TestOverwriteRules(t *testing.T) {
	a := startAgent(t)
	file, link, other := a.folder+"/file", a.folder+"/link", a.folder+"/other"
	must(t, os.WriteFile(file, []byte("old"), 0o600))
	must(t, os.Chmod(file, 0o4777))
	must(t, os.Chown(file, 12346, 12346))
	must(t, os.Chmod(file, 0o4776))
	must(t, os.Link(file, other))
	must(t, os.Symlink("file", link))
	a.want(200, "", "PUT", "/v1/files?"+at(link), []byte("new"))
	if target, _ := os.Readlink(link); target != "file" {
		t.Error("the link was replaced")
	}
	if uid, gid, mode := owner(t, file); uid != 12346 || gid != 12346 || mode != 0o776 {
		t.Errorf("owner %d:%d mode %o", uid, gid, mode)
	}
	if data, _ := os.ReadFile(other); string(data) != "old" {
		t.Errorf("the other hard link holds %q", data)
	}
	if data, _ := os.ReadFile(file); string(data) != "new" {
		t.Errorf("the file holds %q", data)
	}
	a.want(403, "file_permission_denied", "PUT", "/v1/files?"+at(file, "mode=0755"), []byte("x")) // not its owner
	a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/mine", "mode=0751"), []byte("x"))
	a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/mine", "mode=0640"), []byte("x"))
	if uid, _, mode := owner(t, a.folder+"/mine"); uid != 12345 || mode != 0o640 {
		t.Errorf("owner %d mode %o", uid, mode)
	}
	a.want(409, "file_exists", "PUT", "/v1/files?"+at(file, "exclusive=true"), []byte("x"))
	a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/fresh", "exclusive=true"), []byte("x"))

	must(t, os.Symlink("dangling-target", a.folder+"/dangling"))
	a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/dangling"), []byte("x"))
	if data, _ := os.ReadFile(a.folder + "/dangling-target"); string(data) != "x" {
		t.Error("the dangling link was not followed")
	}
	must(t, os.Symlink("loop", a.folder+"/loop"))
	a.want(422, "file_name_invalid", "PUT", "/v1/files?"+at(a.folder+"/loop"), []byte("x"))
	must(t, os.Symlink("/root/planted", a.folder+"/planted"))
	a.want(403, "file_permission_denied", "PUT", "/v1/files?"+at(a.folder+"/planted"), []byte("x"))

	must(t, os.Mkdir(a.folder+"/closed", 0o755))
	must(t, os.WriteFile(a.folder+"/closed/f", []byte("keep"), 0o666))
	must(t, os.WriteFile(a.folder+"/readonly", []byte("keep"), 0o444))
	a.want(403, "file_permission_denied", "PUT", "/v1/files?"+at(a.folder+"/closed/f"), []byte("x"))
	a.want(403, "file_permission_denied", "PUT", "/v1/files?"+at(a.folder+"/closed/g"), []byte("x"))
	a.want(403, "file_permission_denied", "PUT", "/v1/files?"+at(a.folder+"/readonly"), []byte("x"))
	a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/closed/f", "user=root"), []byte("x"))
	a.want(409, "is_a_directory", "PUT", "/v1/files?"+at(a.folder), []byte("x"))
	a.want(409, "is_a_directory", "PUT", "/v1/files?"+at(a.folder+"/name/"), []byte("x"))
	a.want(409, "not_a_directory", "PUT", "/v1/files?"+at(file+"/below"), []byte("x"))
	a.want(404, "file_not_found", "PUT", "/v1/files?"+at(a.folder+"/no/parents", "create_parents=false"), []byte("x"))
	a.want(409, "file_kind_unsupported", "PUT", "/v1/files?path=/dev/null&user=root", []byte("x"))
	a.want(400, "invalid", "PUT", "/v1/files?"+at(file, "mode=99"), []byte("x"))
	a.want(400, "invalid", "PUT", "/v1/files?"+at(file, "exclusive=yes"), []byte("x"))
	noTemporaries(t, a)
}

func noTemporaries(t *testing.T, a *testAgent) {
	t.Helper()
	filepath.WalkDir(a.folder, func(path string, entry os.DirEntry, err error) error {
		if strings.HasPrefix(filepath.Base(path), temporaryPrefix) {
			t.Errorf("%s is left", path)
		}
		return nil
	})
}

func TestReadErrors(t *testing.T) {
	a := startAgent(t)
	must(t, os.WriteFile(a.folder+"/secret", []byte("x"), 0o600))
	a.want(403, "file_permission_denied", "GET", "/v1/files?"+at(a.folder+"/secret"), nil)
	a.want(404, "file_not_found", "GET", "/v1/files?"+at(a.folder+"/none"), nil)
	a.want(409, "is_a_directory", "GET", "/v1/files?"+at(a.folder), nil)
	a.want(409, "not_a_directory", "GET", "/v1/files?"+at(a.folder+"/secret/x", "user=root"), nil)
	a.want(409, "file_kind_unsupported", "GET", "/v1/files?path=/dev/zero", nil)
	a.run("mkfifo "+a.folder+"/fifo", nil)
	a.want(409, "file_kind_unsupported", "GET", "/v1/files?"+at(a.folder+"/fifo"), nil)
	a.want(409, "not_a_directory", "GET", "/v1/files/list?"+at(a.folder+"/fifo"), nil)
	a.want(400, "invalid", "GET", "/v1/files?"+at(a.folder+"/secret", "offset=-1"), nil)
}

func TestUploadThatEndsEarlyKeepsNothing(t *testing.T) {
	a := startAgent(t)
	must(t, os.WriteFile(a.folder+"/f", []byte("old"), 0o666))
	must(t, os.Chmod(a.folder+"/f", 0o666))
	for _, framing := range []string{"Content-Length: 1000\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n5\r\nabc", "Transfer-Encoding: chunked\r\n\r\nzz\r\n"} {
		p := a.dial()
		fmt.Fprintf(p, "PUT /v1/files?%s HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n%s", at(a.folder+"/f"), strings.Repeat("01", 32), framing)
		p.CloseWrite()
		if status, body := p.answer(); status != 400 || !strings.Contains(string(body), "upload_incomplete") {
			t.Errorf("%d %s", status, body)
		}
	}
	if data, _ := os.ReadFile(a.folder + "/f"); string(data) != "old" {
		t.Errorf("%q", data)
	}
	noTemporaries(t, a)
}

func TestFullDisk(t *testing.T) {
	a := startAgent(t)
	full := filepath.Dir(a.folder) + "/full"
	a.want(200, "", "PUT", "/v1/files?"+at(full+"/kept"), []byte("old"))
	a.want(507, "disk_full", "PUT", "/v1/files?"+at(full+"/big"), make([]byte, 8<<20))
	a.want(507, "disk_full", "PUT", "/v1/files?"+at(full+"/kept"), make([]byte, 8<<20))
	if got := a.want(200, "", "GET", "/v1/files?"+at(full+"/kept"), nil); string(got) != "old" {
		t.Errorf("%q", got)
	}
	var list struct{ Entries []fileInfo }
	must(t, json.Unmarshal(a.want(200, "", "GET", "/v1/files/list?"+at(full), nil), &list))
	if len(list.Entries) != 1 {
		t.Errorf("%+v", list.Entries)
	}
	write(t, a, "big", make([]byte, 4<<20))
	a.want(507, "disk_full", "POST", "/v1/files/move?"+at(a.folder+"/big", "to="+full+"/big", "user=root"), nil)
	a.want(200, "", "GET", "/v1/files/stat?"+at(a.folder+"/big"), nil)
	a.want(200, "", "PUT", "/v1/files?"+at(full+"/small"), []byte("fits"))
}

func TestListMoveRemove(t *testing.T) {
	a := startAgent(t)
	for _, name := range []string{"b", "a/z", "a/y/x", "c.d/e"} {
		a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/"+name), []byte(name))
	}
	must(t, os.Symlink("a", a.folder+"/link"))
	list := func(more ...string) string {
		var answer struct{ Entries []fileInfo }
		must(t, json.Unmarshal(a.want(200, "", "GET", "/v1/files/list?"+at(a.folder, more...), nil), &answer))
		var names []string
		for _, i := range answer.Entries {
			names = append(names, strings.TrimPrefix(i.Path, a.folder+"/"))
		}
		return strings.Join(names, " ")
	}
	if got := list(); got != "a b c.d link" {
		t.Error(got)
	}
	if got := list("depth=9"); got != "a a/y a/y/x a/z b c.d c.d/e link" {
		t.Error(got)
	}
	if i := a.info(a.want(200, "", "GET", "/v1/files/stat?"+at(a.folder+"/link"), nil)); i.Kind != "symlink" || *i.LinkTarget != "a" {
		t.Errorf("%+v", i)
	}
	if i := a.info(a.want(200, "", "GET", "/v1/files/stat?"+at(a.folder+"/link", "follow=true"), nil)); i.Kind != "directory" || i.LinkTarget != nil {
		t.Errorf("%+v", i)
	}
	move := func(status int, code, from, to string, more ...string) {
		t.Helper()
		a.want(status, code, "POST", "/v1/files/move?"+at(a.folder+"/"+from, append(more, "to="+a.folder+"/"+to)...), nil)
	}
	move(409, "file_exists", "b", "a/z")
	move(200, "", "b", "a/z", "overwrite=true")
	move(404, "file_not_found", "none", "other")
	move(422, "file_name_invalid", "a", "a/below")
	move(200, "", "link", "link2")
	a.want(409, "directory_not_empty", "DELETE", "/v1/files?"+at(a.folder+"/a"), nil)
	a.want(200, "", "DELETE", "/v1/files?"+at(a.folder+"/link2", "recursive=true"), nil)
	a.want(200, "", "GET", "/v1/files/stat?"+at(a.folder+"/a/z"), nil)
	a.want(200, "", "DELETE", "/v1/files?"+at(a.folder+"/a", "recursive=true"), nil)
	a.want(404, "file_not_found", "DELETE", "/v1/files?"+at(a.folder+"/a", "recursive=true"), nil)
	a.want(403, "file_permission_denied", "DELETE", "/v1/files?"+at(a.folder+"/../etc", "recursive=true"), nil)
	a.want(200, "", "POST", "/v1/files/mkdir?"+at(a.folder+"/m/n", "mode=0700"), nil)
	a.want(200, "", "POST", "/v1/files/mkdir?"+at(a.folder+"/m/n"), nil)
	a.want(409, "file_exists", "POST", "/v1/files/mkdir?"+at(a.folder+"/m/n", "parents=false"), nil)
	a.want(404, "file_not_found", "POST", "/v1/files/mkdir?"+at(a.folder+"/q/n", "parents=false"), nil)
	if _, _, mode := owner(t, a.folder+"/m/n"); mode != 0o700 {
		t.Errorf("%o", mode)
	}
	a.run("mkdir "+a.folder+"/many; cd "+a.folder+"/many; seq 1 20100 | xargs touch", nil)
	var answer struct {
		Entries   []fileInfo
		Truncated bool
	}
	must(t, json.Unmarshal(a.want(200, "", "GET", "/v1/files/list?"+at(a.folder+"/many"), nil), &answer))
	if len(answer.Entries) != maxEntries || !answer.Truncated {
		t.Errorf("%d entries, truncated %t", len(answer.Entries), answer.Truncated)
	}
}

func archive(entries ...tar.Header) []byte {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, header := range entries {
		data := header.PAXRecords["CPUOS.data"]
		header.PAXRecords = nil
		header.Size = int64(len(data))
		if header.Mode == 0 {
			header.Mode = 0o644
		}
		w.WriteHeader(&header)
		w.Write([]byte(data))
	}
	w.Close()
	return out.Bytes()
}

func file(name, data string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeReg, PAXRecords: map[string]string{"CPUOS.data": data}}
}

func TestTrees(t *testing.T) {
	a := startAgent(t)
	put := func(status int, code string, entries ...tar.Header) []byte {
		t.Helper()
		return a.want(status, code, "PUT", "/v1/files/tree?"+at(a.folder+"/t"), archive(entries...))
	}
	long := strings.Repeat("y", 250)
	got := put(200, "", file("a/é", "xx"), tar.Header{Name: "ro/", Typeflag: tar.TypeDir, Mode: 0o555}, file("ro/f", "1"), file(long, "2"), file("bad\xff", "3"),
		tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../../etc"}, tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "a/é"})
	if string(got) != `{"bytes":5,"files":6}` {
		t.Errorf("%s", got)
	}
	if data, _ := os.ReadFile(a.folder + "/t/hard"); string(data) != "xx" {
		t.Errorf("%q", data)
	}
	put(400, "invalid", file("../x", ""))
	put(400, "invalid", file("/x", ""))
	put(400, "invalid", file("a/../../x", ""))
	put(409, "not_a_directory", file("l/passwd", "planted"))
	put(409, "not_a_directory", tar.Header{Name: "l2", Typeflag: tar.TypeSymlink, Linkname: ".."}, file("l2/x", ""))
	put(409, "file_kind_unsupported", tar.Header{Name: "dev", Typeflag: tar.TypeChar})
	put(409, "is_a_directory", tar.Header{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "x"})
	put(200, "", file("l", "no longer a link"))
	if data, _ := os.ReadFile(a.folder + "/t/l"); string(data) != "no longer a link" {
		t.Errorf("%q", data)
	}
	a.want(400, "upload_incomplete", "PUT", "/v1/files/tree?"+at(a.folder+"/u"), archive(file("f", strings.Repeat("x", 5000)))[:2000])
	a.want(400, "invalid", "PUT", "/v1/files/tree?"+at(a.folder+"/u"), bytes.Repeat([]byte("x"), 2000))
	noTemporaries(t, a)

	a.run("mkfifo "+a.folder+"/t/fifo", nil)
	reader := tar.NewReader(bytes.NewReader(a.want(200, "", "GET", "/v1/files/tree?"+at(a.folder+"/t"), nil)))
	var names []string
	for header, err := reader.Next(); err == nil; header, err = reader.Next() {
		names = append(names, fmt.Sprintf("%s:%o", header.Name, header.Mode))
	}
	want := []string{"a/:755", "a/é:644", "bad\xff:644", "hard:644", "l:644", "l2:777", "ro/:555", "ro/f:644", long + ":644"}
	if strings.Join(names, " ") != strings.Join(want, " ") {
		t.Errorf("%q", names)
	}
	write(t, a, "t/secret", []byte("x"))
	must(t, os.Chmod(a.folder+"/t/secret", 0o600))
	a.want(403, "file_permission_denied", "GET", "/v1/files/tree?"+at(a.folder+"/t"), nil)
	a.want(409, "not_a_directory", "GET", "/v1/files/tree?"+at(a.folder+"/t/l"), nil)
	a.want(404, "file_not_found", "GET", "/v1/files/tree?"+at(a.folder+"/none"), nil)

	full := filepath.Dir(a.folder) + "/full"
	must(t, os.Remove(a.folder+"/t/secret"))
	a.want(409, "file_kind_unsupported", "POST", "/v1/files/move?"+at(a.folder+"/t", "to="+full+"/t", "user=root"), nil)
	must(t, os.Remove(a.folder+"/t/fifo"))
	a.want(200, "", "POST", "/v1/files/move?"+at(a.folder+"/t", "to="+full+"/t", "user=root"), nil)
	a.want(404, "file_not_found", "GET", "/v1/files/stat?"+at(a.folder+"/t"), nil)
	a.want(200, "", "GET", "/v1/files/stat?"+at(full+"/t/ro/f"), nil)
}

func TestWatch(t *testing.T) {
	a := startAgent(t)
	must(t, os.MkdirAll(a.folder+"/w/old", 0o777))
	must(t, os.Chmod(a.folder+"/w", 0o777))
	p := a.dial()
	p.request("GET", "/v1/files/watch?"+at(a.folder+"/w", "recursive=true"), nil, upgradeLines)
	if status, body := p.answer(); status != 101 {
		t.Fatalf("%d %s", status, body)
	}
	var told []string
	wait := func(want string) {
		t.Helper()
		for {
			f, err := p.frame()
			if err != nil {
				t.Fatalf("%s never came; told: %q", want, told)
			}
			var event fileEvent
			json.Unmarshal(f.payload, &event)
			text := event.Kind + " " + strings.TrimPrefix(event.Path, a.folder+"/w/")
			if event.MovedTo != nil {
				text += " " + strings.TrimPrefix(*event.MovedTo, a.folder+"/w/")
			}
			told = append(told, text)
			if text == want {
				return
			}
		}
	}
	put := func(name string) { a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/w/"+name), []byte("x")) }
	put("f")
	wait("created f")
	put("f")
	wait("modified f")
	put("new/deep/g")
	wait("created new/deep/g")
	a.want(200, "", "POST", "/v1/files/move?"+at(a.folder+"/w/new", "to="+a.folder+"/w/renamed"), nil)
	wait("moved new renamed")
	put("renamed/deep/h")
	wait("created renamed/deep/h")
	a.run("echo more >> "+a.folder+"/w/f; rm "+a.folder+"/w/f", nil)
	wait("modified f")
	wait("removed f")
	for _, text := range told {
		if strings.Contains(text, temporaryPrefix) {
			t.Errorf("told of a temporary file: %s", text)
		}
	}
	must(t, os.RemoveAll(a.folder+"/w"))
	wait("removed " + a.folder + "/w")
	if f, err := p.frame(); err != nil || f.kind != frameError || !strings.Contains(string(f.payload), "file_not_found") {
		t.Errorf("%v %s", err, f.payload)
	}
	a.want(400, "invalid", "GET", "/v1/files/watch?"+at(a.folder), nil)
	q := a.dial()
	q.request("GET", "/v1/files/watch?"+at(a.folder+"/none"), nil, upgradeLines)
	if status, _ := q.answer(); status != 404 {
		t.Error(status)
	}
}
