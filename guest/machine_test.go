package main

import "testing"

func TestDrivesAreKnownByTheirOrderWhereTheyCarryNoName(t *testing.T) {
	for order, wanted := range map[string][2]string{
		"template,root,workspace": {"/dev/vda", "/dev/vdc"},
		"workspace,template":      {"/dev/vdb", "/dev/vda"},
		"":                        {"", ""},
		"templates,workspaces":    {"", ""},
	} {
		if got := [2]string{inOrder("template", order), inOrder("workspace", order)}; got != wanted {
			t.Errorf("%q: %v, wanted %v", order, got, wanted)
		}
	}
}
