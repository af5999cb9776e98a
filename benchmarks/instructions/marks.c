/* What callgrind counts: everything between start and stop, of all threads. */
#include <valgrind/callgrind.h>

void start(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void stop(void) {
    CALLGRIND_DUMP_STATS;
    CALLGRIND_STOP_INSTRUMENTATION;
}
