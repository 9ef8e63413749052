"""Sizes as people write them, and what is refused."""

import math

import numpy as np
import pytest

from keras_remat.units import (
    GIB,
    MIB,
    TIB,
    check_memory_limit,
    format_bytes,
    format_seconds,
    format_unequal_bytes,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [
        (1, 1),
        (np.int64(12), 12),
        ("1", 1),
        ("17B", 17),
        ("8GiB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8G", 8 * GIB),
        ("8g", 8 * GIB),
        ("512m", 512 * MIB),
        ("8gb", 8 * 10**9),
        (" 512MiB ", 512 * MIB),
        ("8GB", 8 * 10**9),
        ("1.5KiB", 1536),
        (".5KiB", 512),
        ("2.KB", 2000),
        ("1TiB", TIB),
        ("3TB", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_accepted_sizes(limit, nbytes):
    parsed = parse_bytes(limit)
    assert parsed == nbytes
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [("50%", 500), ("100%", 1000), ("0.1%", 1), ("12.5 %", 125), ("0.0001%", 1)],
)
def test_percentages_of_a_known_total(limit, nbytes):
    assert parse_bytes(limit, total_bytes=1000) == nbytes


def test_percentage_is_exact_for_large_totals():
    assert parse_bytes("100%", total_bytes=2**60 + 1) == 2**60 + 1


@pytest.mark.parametrize(
    "limit",
    [
        "8Gb",
        "8 PiB",
        "",
        " ",
        "GiB",
        "-1GiB",
        "-5",
        "1e9",
        "nan",
        "inf",
        "0",
        "0B",
        "0.1B",
        "1,5GiB",
        "1.2.3",
        "0x10",
        "٣GiB",
        0,
        -1,
        np.int32(-7),
        math.nan,
        math.inf,
        -math.inf,
        "0%",
        "101%",
        "-5%",
        "100.0001%",
    ],
)
def test_refused_values_name_the_argument(limit):
    with pytest.raises(ValueError, match="memory_limit"):
        parse_bytes(limit, total_bytes=1000)


@pytest.mark.parametrize("limit", [True, False, 1.5, 8e9, None, [1], (8, "GiB"), b"8GiB", 1j])
def test_refused_types_list_what_is_accepted(limit):
    with pytest.raises(TypeError, match='memory_limit must be an int of bytes, a size like "8GiB"'):
        parse_bytes(limit)


def test_the_unknown_unit_and_the_argument_are_named():
    with pytest.raises(ValueError, match=r"--budget='8Gb' has the unknown unit 'Gb'"):
        parse_bytes("8Gb", what="--budget")
    with pytest.raises(ValueError, match=r'could mean bits; did you mean "8GiB"'):
        parse_bytes("8Gb")


def test_percentage_without_a_total_is_refused():
    with pytest.raises(ValueError, match="total it refers to is unknown"):
        parse_bytes("50%")


@pytest.mark.parametrize("limit", [None, 1024, "8GiB", "80%", "0.1%"])
def test_check_memory_limit_accepts(limit):
    check_memory_limit(limit)


@pytest.mark.parametrize(("limit", "meant"), [(8, "8GiB"), ("8", "8GiB"), ("512B", "512GiB")])
def test_a_few_bytes_are_no_limit(limit, meant):
    with pytest.raises(ValueError, match=f'did you mean "{meant}"'):
        check_memory_limit(limit)


@pytest.mark.parametrize("limit", [10**400, 2**63, "1" * 400, "9" * 30 + "GiB"])
def test_more_than_a_64_bit_integer_is_refused(limit):
    with pytest.raises(ValueError, match="no device has so much memory"):
        parse_bytes(limit)


@pytest.mark.parametrize("nbytes", [10**400, -(10**400)])
def test_any_int_can_be_shown(nbytes):
    assert format_bytes(nbytes).endswith(" TiB")


@pytest.mark.parametrize("limit", ["8Gb", 0, "0%", "120%", math.nan])
def test_check_memory_limit_refuses(limit):
    with pytest.raises(ValueError, match="memory_limit"):
        check_memory_limit(limit)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (-1024, "-1 KiB"),
        (100 * MIB, "100 MiB"),
        (1_500_000, "1.43 MiB"),
        (GIB, "1 GiB"),
        (5 * TIB, "5 TiB"),
        (10_000 * TIB, "10000 TiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


def test_unequal_numbers_never_read_equal():
    first, second = format_unequal_bytes(8 * GIB + 1, 8 * GIB)
    assert first != second
    assert "8589934593" in first
    assert format_unequal_bytes(GIB, GIB) == ("1 GiB", "1 GiB")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-6, "2 µs"),
        (0.00125, "1.25 ms"),
        (0.9996, "1 s"),
        (0.9996e-3, "1 ms"),
        (2.5, "2.5 s"),
        (60, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3600, "60 min 0 s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text
