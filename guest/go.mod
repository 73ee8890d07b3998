module cpuos/guest

go 1.25
