/* Many streams by one call, so that the caller's interpreter has nothing to do between them. */
#include "pcr_internal.h"

/* CRC-32C (Castagnoli, RFC 3720 B.4), reflected: table[k][b] is byte b followed by k zero bytes. */
static void fill_crc_table(pcr_decoder *dec) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82F63B78) : 0);
        dec->crc_table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = dec->crc_table[k - 1][byte];
            dec->crc_table[k][byte] = crc >> 8 ^ dec->crc_table[0][crc & 255];
        }
    dec->have_crc_table = true;
}

size_t pcr_first_damaged(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces, size_t num_images,
                         const uint32_t *crcs) {
    if (!dec->have_crc_table) fill_crc_table(dec);
    for (size_t image = 0; image < num_images; image++, pieces += num_pieces) {
        uint32_t crc = UINT32_MAX;
        for (size_t i = 0; i < num_pieces; i++)
            crc = dec->kernels->crc32c((const uint32_t (*)[256])dec->crc_table, crc, pieces[i].data, pieces[i].size);
        if (~crc != crcs[image]) return image;
    }
    return num_images;
}

void pcr_decode_batch(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces, size_t num_images, const int32_t *crops,
                      const pcr_request *request, uint8_t *out, size_t out_size, int32_t *codes) {
    pcr_request mine = *request;
    for (size_t image = 0; image < num_images; image++) {
        if (crops) {
            const int32_t *crop = crops + 4 * image;
            mine.crop_y = crop[0], mine.crop_x = crop[1], mine.crop_h = crop[2], mine.crop_w = crop[3];
        }
        codes[image] = pcr_decode(dec, pieces + image * num_pieces, num_pieces, &mine, out + image * out_size, out_size);
    }
}
