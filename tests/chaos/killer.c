/* For LD_PRELOAD: kills the process at the n-th operation that changes a file below a folder (`kill_at`).

   A write is cut in half before the kill; other operations are not begun. Reading is not counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_size;
static long stop_at, count;
static int log_file = -1;

#define REAL(name) \
    static __typeof__(name) *next; \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Counts from now on the operations below `folder`, which must be absolute. `n` 0: no kill. `log`: -1, or where the
   operations are written. */
void kill_at(const char *folder, long n, int log) {
    root_size = strlen(folder);
    memcpy(root, folder, root_size + 1);
    stop_at = n, count = 0, log_file = log;
}

long kill_count(void) { return count; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Whether this operation, on a path below the folder, is the n-th. */
static int counted(const char *what, const char *path) {
    if (!root_size || strncmp(path, root, root_size) || (path[root_size] && path[root_size] != '/')) return 0;
    long n = __sync_add_and_fetch(&count, 1);
    if (log_file >= 0) dprintf(log_file, "%ld %s %s\n", n, what, path + root_size);
    return n == stop_at;
}

static const char *path_of(int file, char *out) {
    char link[40];
    if (file == AT_FDCWD) return getcwd(out, PATH_MAX) ? out : "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, out, PATH_MAX - 1);
    out[size < 0 ? 0 : size] = 0;
    return out;
}

static int on_path(const char *what, int folder, const char *path) {
    char start[PATH_MAX], whole[2 * PATH_MAX];
    if (!root_size || !path) return 0;
    if (path[0] == '/') return counted(what, path);
    snprintf(whole, sizeof whole, "%s/%s", path_of(folder, start), path);
    return counted(what, whole);
}

static int on_file(const char *what, int file) {
    char path[PATH_MAX];
    if (!root_size || file == log_file) return 0;
    int flags = fcntl(file, F_GETFL);
    if (flags < 0 || ((flags & O_ACCMODE) == O_RDONLY && strcmp(what, "fsync"))) return 0;
    return counted(what, path_of(file, path));
}

static int changes(int flags) { return flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        if (changes(flags) && on_path("open", AT_FDCWD, path)) die(); \
        return next(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        if (changes(flags) && on_path("open", folder, path)) die(); \
        return next(folder, path, flags, mode); \
    }
#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        if (strpbrk(mode, "wa+") && on_path("open", AT_FDCWD, path)) die(); \
        return next(path, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

/* RESULT NAME(PARAMETERS): calls NAME(ARGUMENTS), unless CHECK. HALF is done before the kill. */
#define WRAP(result, name, parameters, check, half, arguments) \
    result name parameters { \
        REAL(name); \
        if (check) { \
            half; \
            die(); \
        } \
        return next arguments; \
    }
#define FILE_CALL(name, what) WRAP(int, name, (int file), on_file(what, file), , (file))
FILE_CALL(fsync, "fsync")
FILE_CALL(fdatasync, "fsync")
FILE_CALL(close, "close")
WRAP(int, ftruncate, (int file, off_t size), on_file("truncate", file), , (file, size))
WRAP(int, ftruncate64, (int file, off_t size), on_file("truncate", file), , (file, size))

#define PART(size) ((size) < 8192 ? 1 : 4096)
WRAP(ssize_t, write, (int file, const void *data, size_t size), on_file("write", file), next(file, data, size / 2),
     (file, data, size))
WRAP(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), on_file("write", file),
     next(file, data, size / 2, at), (file, data, size, at))
WRAP(ssize_t, pwrite64, (int file, const void *data, size_t size, off_t at), on_file("write", file),
     next(file, data, size / 2, at), (file, data, size, at))
WRAP(ssize_t, writev, (int file, const struct iovec *parts, int size), on_file("write", file),
     next(file, parts, size / 2), (file, parts, size))
WRAP(ssize_t, sendfile, (int out, int in, off_t *at, size_t size), on_file("copy", out),
     next(out, in, at, PART(size)), (out, in, at, size))
WRAP(ssize_t, sendfile64, (int out, int in, off_t *at, size_t size), on_file("copy", out),
     next(out, in, at, PART(size)), (out, in, at, size))
WRAP(ssize_t, copy_file_range, (int in, off_t *from, int out, off_t *to, size_t size, unsigned flags),
     on_file("copy", out), next(in, from, out, to, PART(size), flags), (in, from, out, to, size, flags))
WRAP(void *, mmap, (void *at, size_t size, int access, int flags, int file, off_t offset),
     file >= 0 && (flags & MAP_SHARED) && (access & PROT_WRITE) && on_file("map", file), ,
     (at, size, access, flags, file, offset))

WRAP(int, mkdir, (const char *path, mode_t mode), on_path("mkdir", AT_FDCWD, path), , (path, mode))
WRAP(int, mkdirat, (int in, const char *path, mode_t mode), on_path("mkdir", in, path), , (in, path, mode))
WRAP(int, rmdir, (const char *path), on_path("rmdir", AT_FDCWD, path), , (path))
WRAP(int, unlink, (const char *path), on_path("unlink", AT_FDCWD, path), , (path))
WRAP(int, unlinkat, (int in, const char *path, int flags), on_path("unlink", in, path), , (in, path, flags))
WRAP(int, truncate, (const char *path, off_t size), on_path("truncate", AT_FDCWD, path), , (path, size))
WRAP(int, rename, (const char *old, const char *path), on_path("rename", AT_FDCWD, path), , (old, path))
WRAP(int, renameat, (int from, const char *old, int in, const char *path), on_path("rename", in, path), ,
     (from, old, in, path))
WRAP(int, renameat2, (int from, const char *old, int in, const char *path, unsigned flags),
     on_path("exchange", in, path), , (from, old, in, path, flags))
WRAP(int, link, (const char *old, const char *path), on_path("link", AT_FDCWD, path), , (old, path))
WRAP(int, linkat, (int from, const char *old, int in, const char *path, int flags), on_path("link", in, path), ,
     (from, old, in, path, flags))
WRAP(int, symlink, (const char *to, const char *path), on_path("symlink", AT_FDCWD, path), , (to, path))
WRAP(int, symlinkat, (const char *to, int in, const char *path), on_path("symlink", in, path), , (to, in, path))
