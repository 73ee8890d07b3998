package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// What the kernel lets a user do holds for the agent's calls too, and what they cannot see is never missing unsaid.

func TestProgramsOpenTheirStreamsAnew(t *testing.T) {
	a := startAgent(t)
	for _, user := range []string{"user", "root"} {
		r := a.run("echo out > /proc/self/fd/1; echo err > /proc/self/fd/2", with{"user": user})
		if string(r.out) != "out\n" || string(r.err) != "err\n" {
			t.Errorf("%s: %q %q", user, r.out, r.err)
		}
	}
}

func TestNoModeOfAForeignGroup(t *testing.T) {
	a := startAgent(t)
	folder := a.folder + "/shared"
	must(t, os.Mkdir(folder, 0o755))
	must(t, os.Chown(folder, 0, 0))
	must(t, syscall.Chmod(folder, 0o2777))
	if i := a.info(a.want(200, "", "PUT", "/v1/files?"+at(folder+"/f", "mode=2755"), []byte("x"))); i.GID != 0 || i.Mode != 0o755 {
		t.Errorf("%+v", i)
	}
	if i := a.info(a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/own", "mode=6755"), []byte("x"))); i.Mode != 0o6755 {
		t.Errorf("%+v", i)
	}
	if i := a.info(a.want(200, "", "PUT", "/v1/files?"+at(folder+"/f", "mode=2755", "user=root"), []byte("x"))); i.Mode != 0o2755 {
		t.Errorf("%+v", i)
	}
}

func TestTreesAreWholeOrRefused(t *testing.T) {
	a := startAgent(t)
	a.want(200, "", "PUT", "/v1/files?"+at(a.folder+"/t/names/f"), []byte("x"))
	must(t, os.Chmod(a.folder+"/t/names", 0o444)) // tells names, and nothing of what they name
	full := filepath.Dir(a.folder) + "/full"
	must(t, os.Chmod(full, 0o777))
	for _, path := range []string{a.folder + "/t", a.folder + "/t/names"} {
		a.want(403, "file_permission_denied", "GET", "/v1/files/tree?"+at(path), nil)
		a.want(403, "file_permission_denied", "POST", "/v1/files/move?"+at(path, "to="+full+"/moved"), nil)
	}
	a.want(403, "file_permission_denied", "GET", "/v1/files/list?"+at(a.folder+"/t/names"), nil)
	must(t, os.Mkdir(a.folder+"/deep", 0o777))
	r := a.run("for i in $(seq 40); do mkdir "+strings.Repeat("d", 200)+" && cd "+strings.Repeat("d", 200)+"; done; echo leaf > leaf", with{"cwd": a.folder + "/deep", "user": "root"})
	if *r.ExitCode != 0 {
		t.Fatalf("%s", r.err)
	}
	deep := a.folder + "/deep"
	a.want(422, "file_name_invalid", "GET", "/v1/files/tree?"+at(deep, "user=root"), nil)
	a.want(422, "file_name_invalid", "POST", "/v1/files/move?"+at(deep, "to="+full+"/deep", "user=root"), nil)
	a.want(200, "", "DELETE", "/v1/files?"+at(deep, "recursive=true", "user=root"), nil)
	if _, err := os.Lstat(full + "/deep"); err == nil {
		t.Error("a part of a refused move is left")
	}
}

// Asked of the guard alone: a test whose failure would remove the machine it runs on is none.
func TestNeitherTheRootNorProcIsRemoved(t *testing.T) {
	for _, path := range []string{"/", "//", "/./", "/proc", "/proc/self", "/proc/self/fd"} {
		if err := demandRemovable(path); err != syscall.EBUSY {
			t.Errorf("%s: %v", path, err)
		}
	}
	must(t, demandRemovable(t.TempDir()))
}
