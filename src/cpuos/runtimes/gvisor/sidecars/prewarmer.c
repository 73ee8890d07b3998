/* gvisor-sentry-prewarmer: PROGRAM ARGV0 ARGUMENTS...
 * Grows the descriptor table past 255 while the process has one thread, then becomes PROGRAM. A dup3 to 253-255 in a
 * process with threads waits for an RCU grace period, about 20 ms. */
#include <fcntl.h>
#include <unistd.h>

extern char **environ;

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    int descriptor = open("/dev/null", O_RDONLY);
    if (descriptor >= 0) {
        dup2(descriptor, 255);
        close(255);
        close(descriptor);
    }
    execve(argv[1], argv + 2, environ);
    return 127;
}
