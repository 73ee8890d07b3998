module cpuos/guest

go 1.26.0

require (
	golang.org/x/sync v0.25.0
	golang.org/x/sys v0.50.0
)
