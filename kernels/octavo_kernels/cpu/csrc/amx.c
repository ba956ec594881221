// Whether this process may use AMX: Linux keeps the tiles' eight kilobytes a thread from those that do not ask.
#define _GNU_SOURCE
#include "amx.h"

#ifdef HAVE_AMX

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

// To be called once the library is loaded, before anything else; it counts for every thread of the process.
// Returns 0, or the errno of a system that refuses.
EXPORT int64_t octavo_start(void) {
#ifndef OCTAVO_EMULATE_AMX
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0)
        return errno;
#endif
    return 0;
}

#endif
