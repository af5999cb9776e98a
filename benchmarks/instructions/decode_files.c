/* Decodes JPEG files whole to RGB, REPEATS times each, and prints a CRC-32C of each one's pixels:
 * decode_files auto|portable REPEATS FILE... */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pcr.h"

static uint8_t *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) exit(1);
    *size = (size_t)ftell(file);
    rewind(file);
    uint8_t *data = malloc(*size);
    if (!data || fread(data, 1, *size, file) != *size) exit(1);
    fclose(file);
    return data;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    int portable = strcmp(argv[1], "portable") == 0, repeats = atoi(argv[2]);
    pcr_decoder *decoder = pcr_decoder_new(portable ? PCR_BACKEND_PORTABLE : PCR_BACKEND_AUTO);
    if (!decoder) return 1;
    fprintf(stderr, "%s\n", pcr_decoder_backend(decoder));
    for (int i = 3; i < argc; i++) {
        size_t size;
        uint8_t *data = read_file(argv[i], &size);
        pcr_piece piece = {data, size};
        pcr_request request = {0};
        int32_t height, width;
        int code = pcr_output_size(decoder, &piece, 1, &request, &height, &width);
        size_t room = code ? 0 : (size_t)height * (size_t)width * 3;
        uint8_t *pixels = malloc(room ? room : 1);
        for (int repeat = 0; repeat < repeats && !code; repeat++)
            code = pcr_decode(decoder, &piece, 1, &request, pixels, room);
        if (code) {
            fprintf(stderr, "%s: %s\n", argv[i], pcr_message(decoder));
            return 1;
        }
        printf("%08x\n", (unsigned)pcr_crc32c(0, pixels, room));
        free(pixels);
        free(data);
    }
    pcr_decoder_free(decoder);
    return 0;
}
