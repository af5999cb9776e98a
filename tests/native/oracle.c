/* Test oracle: libjpeg's decode of a stream, with block smoothing off. Built by the tests only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <setjmp.h>
#include <jpeglib.h>

static jmp_buf failed;
static void on_error(j_common_ptr cinfo) {
    (*cinfo->err->output_message)(cinfo);
    longjmp(failed, 1);
}

/* Decodes into *out (malloc'ed); returns the number of warnings, or -1. */
int oracle_decode(const unsigned char *data, unsigned long size, int color, int scale,
                  unsigned char **out, int *shape) {
    struct jpeg_decompress_struct cinfo;
    struct jpeg_error_mgr err;
    cinfo.err = jpeg_std_error(&err);
    err.error_exit = on_error;
    *out = NULL;
    if (setjmp(failed)) {
        jpeg_destroy_decompress(&cinfo);
        free(*out);
        return -1;
    }
    jpeg_create_decompress(&cinfo);
    jpeg_mem_src(&cinfo, (unsigned char *)data, size);
    jpeg_read_header(&cinfo, TRUE);
    cinfo.do_block_smoothing = FALSE;
    cinfo.scale_num = 1;
    cinfo.scale_denom = (unsigned)scale;
    cinfo.out_color_space = color == 2 ? JCS_CMYK : color == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_start_decompress(&cinfo);
    shape[0] = (int)cinfo.output_height, shape[1] = (int)cinfo.output_width,
        shape[2] = cinfo.output_components;
    size_t row = (size_t)shape[1] * (size_t)shape[2];
    *out = malloc(row * (size_t)shape[0]);
    while (cinfo.output_scanline < cinfo.output_height) {
        unsigned char *line = *out + row * cinfo.output_scanline;
        jpeg_read_scanlines(&cinfo, &line, 1);
    }
    int warnings = (int)err.num_warnings;
    jpeg_finish_decompress(&cinfo);
    jpeg_destroy_decompress(&cinfo);
    return warnings;
}
void oracle_free(unsigned char *p) { free(p); }
