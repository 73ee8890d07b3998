module cpuos/guest

go 1.24
