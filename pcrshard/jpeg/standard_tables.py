"""The Huffman tables of T.81 annex K.3, which Motion JPEG frames omit."""

from __future__ import annotations

# Tables K.3 and K.4: the number of codes of each length from 1 to 16 bits; symbols are 0 to 11.
_DC_LUMA = "00010501010101010100000000000000"
_DC_CHROMA = "00030101010101010101010000000000"
# Tables K.5 and K.6: the same, followed by the symbols.
_AC_LUMA = """
0002010303020403050504040000017d
01020300041105122131410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a25262728
292a3435363738393a434445464748494a535455565758595a636465666768696a737475767778797a83848586878889
8a92939495969798999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae1e2
e3e4e5e6e7e8e9eaf1f2f3f4f5f6f7f8f9fa
"""
_AC_CHROMA = """
00020102040403040705040400010277
000102031104052131061241510761711322328108144291a1b1c109233352f0156272d10a162434e125f11718191a26
2728292a35363738393a434445464748494a535455565758595a636465666768696a737475767778797a828384858687
88898a92939495969798999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9da
e2e3e4e5e6e7e8e9eaf2f3f4f5f6f7f8f9fa
"""
_LENGTH_BYTES = 2


def _segment(place: int, table: bytes) -> bytes:
    """Return a DHT segment (T.81 B.2.4.2): class and number of the table, then the table."""
    payload = bytes([place]) + table
    return b"\xff\xc4" + (_LENGTH_BYTES + len(payload)).to_bytes(2) + payload


_DC_SYMBOLS = bytes(range(12))
# Tables 0 are for luma, 1 for chroma; class 0 is DC, 1 is AC.
STANDARD_TABLES = b"".join(
    [
        _segment(0x00, bytes.fromhex(_DC_LUMA) + _DC_SYMBOLS),
        _segment(0x10, bytes.fromhex(_AC_LUMA)),
        _segment(0x01, bytes.fromhex(_DC_CHROMA) + _DC_SYMBOLS),
        _segment(0x11, bytes.fromhex(_AC_CHROMA)),
    ]
)
