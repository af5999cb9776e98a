/* Many streams by one call, so that the caller's interpreter has nothing to do between them. */
#include "pcr_internal.h"

void pcr_decode_batch(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
                      size_t num_images, const int32_t *crops, const pcr_request *request,
                      uint8_t *out, size_t out_size, int32_t *codes) {
    pcr_request mine = *request;
    for (size_t image = 0; image < num_images; image++) {
        if (crops) {
            /* The caller's array need not be aligned. */
            int32_t crop[4];
            memcpy(crop, (const char *)crops + sizeof crop * image, sizeof crop);
            mine.crop_y = crop[0], mine.crop_x = crop[1], mine.crop_h = crop[2],
                mine.crop_w = crop[3];
        }
        int32_t code = pcr_decode(dec, pieces + image * num_pieces, num_pieces, &mine,
                                  out + image * out_size, out_size);
        memcpy((char *)codes + sizeof code * image, &code, sizeof code);
    }
}
