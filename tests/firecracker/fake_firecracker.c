// Stands in for Firecracker behind its API: takes what its public description allows, opens what a real one would open
// (in its jail, as its user), records each request in /requests, and does by /script what a bad one would do:
//   METHOD PATH<tab>die | silent | flood | raw TEXT | STATUS BODY
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static char request[1 << 17], script[1 << 16], boot_arguments[4096], fault[256];
static const char *state = "Not started";
static const char *version = VERSION;

static void say(int out, const char *text) {
    if (write(out, text, strlen(text)) < 0 && errno != EPIPE) _exit(3);
}

static void answer(int out, int status, const char *body) {
    static char text[1 << 17];
    if (status == 204)
        snprintf(text, sizeof text, "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n");
    else
        snprintf(text, sizeof text,
                 "HTTP/1.1 %d \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
                 "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                 status, strlen(body), body);
    say(out, text);
}

// The value of a key of a flat JSON object: good enough for what is sent here.
static const char *value(const char *body, const char *key, char *into, size_t size) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *found = strstr(body, quoted);
    if (!found) return NULL;
    found += strlen(quoted);
    const char *end = *found == '"' ? strchr(++found, '"') : found + strcspn(found, ",}");
    snprintf(into, size, "%.*s", (int)(end - found), found);
    return into;
}

static int refuse(const char *what, const char *path) {
    snprintf(fault, sizeof fault, "{\"fault_message\": \"%s: %s: %s\"}", what, path, strerror(errno));
    return 400;
}

static int opens(const char *what, const char *path, int flags) {
    int file = open(path, flags, 0600);
    if (file < 0) return refuse(what, path);
    if (flags & O_TRUNC && write(file, path, strlen(path)) < 0) return refuse(what, path);
    close(file);
    return 204;
}

static int report(const char *body, const char *key, const char *line) {
    char path[256];
    int file = open(value(body, key, path, sizeof path), O_RDWR | O_NONBLOCK);
    if (file < 0) return refuse("open", path);
    say(file, line);
    return 204;
}

static int take_tap(const char *name) {
    struct ifreq wanted = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(wanted.ifr_name, IFNAMSIZ, "%s", name);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    return tap < 0 || ioctl(tap, TUNSETIFF, &wanted) < 0 ? refuse("open tap", name) : 204;
}

static int take_drive(const char *body) {
    char path[256], read_only[16];
    value(body, "is_read_only", read_only, sizeof read_only);
    value(body, "path_on_host", path, sizeof path);
    return opens("drive", path, strcmp(read_only, "true") ? O_RDWR : O_RDONLY);
}

#define ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))
static void print_sum(const char *word) {  // FIPS 180-4, of one block
    uint32_t h[8], k[64], w[64] = {0};
    for (int found = 0, n = 2; found < 64; n++) {
        int prime = 1;
        for (int d = 2; d * d <= n; d++) prime &= n % d != 0;
        if (!prime) continue;
        long double root = __builtin_cbrtl(n), square = __builtin_sqrtl(n);
        if (found < 8) h[found] = (uint32_t)((square - (uint32_t)square) * 4294967296.0L);
        k[found++] = (uint32_t)((root - (uint32_t)root) * 4294967296.0L);
    }
    size_t length = strlen(word);
    unsigned char block[64] = {0};
    memcpy(block, word, length);
    block[length] = 0x80, block[62] = length * 8 >> 8, block[63] = length * 8;
    for (int i = 0; i < 16; i++)
        w[i] = block[4 * i] << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (ROTATE(w[i - 15], 7) ^ ROTATE(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (ROTATE(w[i - 2], 17) ^ ROTATE(w[i - 2], 19) ^ w[i - 2] >> 10);
    uint32_t v[8];
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t one = v[7] + (ROTATE(v[4], 6) ^ ROTATE(v[4], 11) ^ ROTATE(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) +
                       k[i] + w[i];
        uint32_t two = (ROTATE(v[0], 2) ^ ROTATE(v[0], 13) ^ ROTATE(v[0], 22)) +
                       ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += one, v[0] = one + two;
    }
    for (int i = 0; i < 8; i++) printf("%08x", h[i] + v[i]);
    printf("\n");
    fflush(stdout);
}

static int start(void) {
    state = "Running";
    char *word = strstr(boot_arguments, "--word "), *end = word ? strchr(word + 7, ' ') : NULL;
    if (end) *end = 0;
    if (word) print_sum(word + 7);
    return 204;
}

static int serve(const char *what, const char *body) {
    char text[4096] = "";
    if (!strcmp(what, "PUT /logger")) return report(body, "log_path", "2026-11-30 [anonymous] a line of the log\n");
    if (!strcmp(what, "PUT /metrics")) return report(body, "metrics_path", "{\"seccomp\": {\"num_faults\": 3}}\n");
    if (!strncmp(what, "PUT /drives/", 12)) return take_drive(body);
    if (!strncmp(what, "PUT /network-interfaces/", 24))
        return take_tap(value(body, "host_dev_name", text, sizeof text) ? text : "");
    if (!strcmp(what, "PUT /boot-source")) {
        value(body, "boot_args", boot_arguments, sizeof boot_arguments);
        int status = opens("kernel", value(body, "kernel_image_path", text, sizeof text), O_RDONLY);
        return status == 204 ? opens("initrd", value(body, "initrd_path", text, sizeof text), O_RDONLY) : status;
    }
    if (!strcmp(what, "PUT /actions")) return start();
    if (!strcmp(what, "PATCH /vm")) return state = strstr(body, "Paused") ? "Paused" : "Running", 204;
    if (!strcmp(what, "PUT /snapshot/create")) {
        if (strcmp(state, "Paused")) return errno = EBUSY, refuse("snapshot", "not paused");
        opens("state", value(body, "snapshot_path", text, sizeof text), O_RDWR | O_TRUNC);
        return opens("memory", value(body, "mem_file_path", text, sizeof text), O_RDWR | O_TRUNC);
    }
    if (!strcmp(what, "PUT /snapshot/load")) {
        state = "Paused";
        int status = opens("state", value(body, "snapshot_path", text, sizeof text), O_RDONLY);
        return status == 204 ? opens("memory", value(body, "backend_path", text, sizeof text), O_RDONLY) : status;
    }
    return 204;
}

static int misbehaves(int out, const char *what) {
    char line[512];
    snprintf(line, sizeof line, "%s\t", what);
    char *found = strstr(script, line);
    if (!found || (found != script && found[-1] != '\n')) return 0;
    found += strlen(line);
    size_t length = strcspn(found, "\n");
    char *action = strndup(found, length);
    if (!strcmp(action, "die")) _exit(1);
    if (!strcmp(action, "silent")) return 1;
    if (!strcmp(action, "flood"))
        for (say(out, "HTTP/1.1 200 \r\n"); write(out, "X: x\r\n", 6) > 0;) {}
    else if (!strncmp(action, "raw ", 4)) {
        for (char *from = action + 4, *to = action + 4; (*to = *from); from++, to++)
            if (from[0] == '\\') *to = *++from == 'r' ? '\r' : '\n';
        say(out, action + 4);
    } else
        answer(out, atoi(action), strchr(action, ' ') ? strchr(action, ' ') + 1 : "");
    close(out);
    return 1;
}

static void handle(int connection, int record) {
    size_t length = 0, wanted = 0;
    char *body = NULL;
    while (!body || length < wanted) {
        ssize_t got = read(connection, request + length, sizeof request - 1 - length);
        if (got <= 0) { close(connection); return; }
        length += got, request[length] = 0;
        if (!body && (body = strstr(request, "\r\n\r\n"))) {
            body += 4;
            char *header = strcasestr(request, "content-length: ");
            wanted = (body - request) + (header && header < body ? strtoul(header + 16, NULL, 10) : 0);
        }
    }
    char *end = strstr(request, " HTTP/1.1\r\n");
    if (!end) _exit(4);
    *end = 0;
    dprintf(record, "%s\t%s\n", request, body);
    if (misbehaves(connection, request)) return;
    char text[512];
    if (!strcmp(request, "GET /version")) {
        snprintf(text, sizeof text, "{\"firecracker_version\": \"%s\"}", version);
        answer(connection, 200, text);
    } else if (!strcmp(request, "GET /")) {
        const char *form = "{\"app_name\": \"Firecracker\", \"id\": \"x\", \"state\": \"%s\", \"vmm_version\": \"%s\"}";
        snprintf(text, sizeof text, form, state, version);
        answer(connection, 200, text);
    } else {
        int status = serve(request, body);
        answer(connection, status, fault);
    }
    close(connection);
}

int main(int count, char **words) {
    struct sockaddr_un place = {.sun_family = AF_UNIX};
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "--version")) return printf("Firecracker v%s\n\n", version), 0;
        if (!strcmp(words[i], "--api-sock")) snprintf(place.sun_path, sizeof place.sun_path, "%s", words[++i]);
        else if (!strcmp(words[i], "--id") || !strcmp(words[i], "--start-time-us") ||
                 !strcmp(words[i], "--start-time-cpu-us") || !strcmp(words[i], "--parent-cpu-time-us")) i++;
        else return fprintf(stderr, "Error: UnexpectedArgument(\"%s\")\n", words[i]), 153;
    }
    signal(SIGPIPE, SIG_IGN);
    int file = open("/script", O_RDONLY);
    if (file >= 0 && read(file, script, sizeof script - 1) < 0) return 5;
    if (!strncmp(script, "start\tdie", 9)) return fprintf(stderr, "Error: it dies at once\n"), 1;
    int record = open("/requests", O_CREAT | O_WRONLY | O_APPEND, 0600), server = socket(AF_UNIX, SOCK_STREAM, 0);
    if (!strncmp(script, "start\tsilent", 12)) pause();
    if (record < 0 || bind(server, (struct sockaddr *)&place, sizeof place) < 0 || listen(server, 8) < 0)
        return perror(place.sun_path), 6;
    for (;;) handle(accept(server, NULL, NULL), record);
}
