/* Feeds files to the fuzzing harness, one after the other, and prints a checksum of the pixels of
 * each: for machines without libFuzzer, such as a big-endian one under qemu. See fuzz/portable.sh.
 */
#include <stdio.h>
#include <stdlib.h>

#include "pcr.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void print_pixels(const char *name, const uint8_t *data, size_t size) {
    pcr_piece piece = {data, size};
    pcr_request request = {.max_pixels = 1 << 24};
    pcr_decoder *decoder = pcr_decoder_new(PCR_BACKEND_AUTO);
    int32_t height = 0, width = 0;
    uint32_t sum = 0;
    int code = decoder ? pcr_output_size(decoder, &piece, 1, &request, &height, &width) : -1;
    if (code == PCR_OK) {
        size_t count = (size_t)height * (size_t)width * 3;
        uint8_t *out = malloc(count);
        code = out ? pcr_decode(decoder, &piece, 1, &request, out, count) : -1;
        for (size_t i = 0; code == PCR_OK && i < count; i++) sum = sum * 31 + out[i];
        free(out);
    }
    printf("%s %d %dx%d %08x\n", name, code, (int)width, (int)height, (unsigned)sum);
    pcr_decoder_free(decoder);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file || fseek(file, 0, SEEK_END)) return 1;
        long size = ftell(file);
        rewind(file);
        uint8_t *data = malloc((size_t)size + 1);
        if (!data || fread(data, 1, (size_t)size, file) != (size_t)size) return 1;
        fclose(file);
        print_pixels(argv[i], data, (size_t)size);
        /* The first eight bytes choose the request; some of each kind. */
        LLVMFuzzerTestOneInput(data, (size_t)size);
        free(data);
    }
    return 0;
}
