/* Many streams by one call, so that the caller's interpreter has nothing to do between them. */
#include "crc32c.h"
#include "pcr_internal.h"

static uint32_t crc_of(pcr_decoder *dec, uint32_t crc, const uint8_t *data, size_t size) {
    if (!dec->have_crc_table) {
        pcr_crc32c_fill(dec->crc_table);
        dec->have_crc_table = true;
    }
    return dec->kernels->crc32c((const uint32_t (*)[256])dec->crc_table, crc, data, size);
}

size_t pcr_first_damaged(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
                         size_t num_images, const uint32_t *crcs) {
    for (size_t image = 0; image < num_images; image++, pieces += num_pieces) {
        uint32_t crc = UINT32_MAX;
        for (size_t i = 0; i < num_pieces; i++)
            crc = crc_of(dec, crc, pieces[i].data, pieces[i].size);
        if (~crc != crcs[image]) return image;
    }
    return num_images;
}

size_t pcr_join(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces, size_t num_images,
                const uint32_t *crcs, uint8_t *out, size_t out_size) {
    size_t image = 0;
    for (; image < num_images; image++, pieces += num_pieces) {
        size_t size = 0;
        for (size_t i = 0; i < num_pieces; i++) {
            if (pieces[i].size > out_size - size) return image;
            if (pieces[i].size) memcpy(out + size, pieces[i].data, pieces[i].size);
            size += pieces[i].size;
        }
        if (size == 0 || out_size - size < 2) return image;
        /* Here rather than from the pieces, because the bytes are in the processor's cache now. */
        if (crcs && ~crc_of(dec, UINT32_MAX, out, size) != crcs[image]) return image;
        out[size] = 0xFF, out[size + 1] = 0xD9;
        out += size + 2, out_size -= size + 2;
    }
    return image;
}

void pcr_decode_batch(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
                      size_t num_images, const int32_t *crops, const pcr_request *request,
                      uint8_t *out, size_t out_size, int32_t *codes) {
    pcr_request mine = *request;
    for (size_t image = 0; image < num_images; image++) {
        if (crops) {
            const int32_t *crop = crops + 4 * image;
            mine.crop_y = crop[0], mine.crop_x = crop[1], mine.crop_h = crop[2],
                mine.crop_w = crop[3];
        }
        codes[image] = pcr_decode(dec, pieces + image * num_pieces, num_pieces, &mine,
                                  out + image * out_size, out_size);
    }
}
