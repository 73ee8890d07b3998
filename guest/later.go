package main

import "syscall"

func (a *agent) watchFiles(r *request, _ string) error            { return fail(500, "internal", "not yet") }
func (a *agent) readTree(r *request, _ string) error              { return fail(500, "internal", "not yet") }
func (a *agent) writeTree(r *request, _ string) error             { return fail(500, "internal", "not yet") }
func (a *agent) moveAcross(from, to string, overwrite bool) error { return syscall.EXDEV }
