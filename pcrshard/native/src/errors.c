/* What went wrong, kept in the decoder until its next call. */
#include <stdarg.h>
#include <stdio.h>

#include "pcr_internal.h"

int pcr_fail(pcr_decoder *dec, int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(dec->message, sizeof dec->message, format, arguments);
    va_end(arguments);
    return code;
}

const char *pcr_message(const pcr_decoder *dec) { return dec->message; }
