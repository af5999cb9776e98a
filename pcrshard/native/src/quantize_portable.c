/* The kernel of the error-bounded quantizer for any processor. */
#include "quantize.h"

size_t pcr_quantize_portable(const void *values, int type, size_t first, size_t count,
                             const pcr_coding *how, int8_t *codes) {
    size_t escapes = 0;
    for (size_t i = first; i < count; i++) {
        codes[i] = pcr_quantize_one(pcr_value_at(values, type, i), how, i);
        escapes += codes[i] == PCR_ESCAPE;
    }
    return escapes;
}
