package main

import (
	"fmt"
	"os"
	"testing"
)

func TestWhatTheKernelCountedIsToldToOneCommand(t *testing.T) {
	folder := t.TempDir()
	count := func(killed, refused int) {
		must(t, os.WriteFile(folder+"/memory", fmt.Appendf(nil, "low 0\noom 9\noom_kill %d\noom_group_kill 0\n", killed), 0o644))
		must(t, os.WriteFile(folder+"/processes", fmt.Appendf(nil, "max %d\n", refused), 0o644))
	}
	count(1, 3)
	for name, file := range map[string]**os.File{"": &group.folder, "/memory": &group.memory, "/processes": &group.processes} {
		opened, err := os.Open(folder + name)
		must(t, err)
		*file = opened
	}
	defer func() { group.folder, group.told = nil, limitsMet{} }()
	one, other := countMet(), countMet()
	if one != (limitsMet{1, 3}) {
		t.Fatalf("counted %v", one)
	}
	want := func(got, wanted string) {
		t.Helper()
		if got != wanted {
			t.Fatalf("told %q, wanted %q", got, wanted)
		}
	}
	want(findMet(one, true), "")
	count(2, 3)
	want(findMet(one, false), "memory")
	want(findMet(other, true), "") // the first was told
	count(2, 4)
	want(findMet(other, false), "") // it did not mind
	want(findMet(other, true), "processes")
	count(3, 4)
	want(findMet(countMet(), true), "") // before it began
}
