"""Readers of files: the examples, reading from the middle, and what damaged or missing files raise."""

import functools
import gzip
import io
import itertools
import pickle
import sys
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import webdataset

from torchstrategy.data import Dataset, readers
from torchstrategy.data.readers.arrays import _Column
from torchstrategy.errors import DataLossError, InvalidArgumentError, NotFoundError, UnimplementedError

IDX_CODES = {"u1": 8, "i1": 9, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array):
    code = IDX_CODES[array.dtype.str[1:]]
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path, array):
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_tar(path, samples):
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def images_and_labels(num_examples):
    images = np.random.default_rng(0).integers(0, 256, (num_examples, 4, 3), dtype=np.uint8)
    return images, np.arange(num_examples) % 10


def shards(folder, num_examples=11):
    """Return a file of each format, its reader, and a function that tells which example it was."""
    images, labels = images_and_labels(num_examples)
    labels = np.arange(num_examples)
    (folder / "a.txt").write_text("".join(f"{label}\n" for label in labels))
    (folder / "a.txt.gz").write_bytes(gzip.compress((folder / "a.txt").read_bytes()))
    pair = (
        write_idx(folder / "images-idx3-ubyte.gz", images),
        write_idx(folder / "labels-idx1-ubyte", labels.astype(np.uint8)),
    )
    np.save(folder / "a.npy", labels)
    np.savez(folder / "a.npz", image=images, label=labels)
    np.savez_compressed(folder / "packed.npz", image=images, label=labels)
    table = pyarrow.table({"image": [image.ravel() for image in images], "label": labels})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)
    write_tar(
        folder / "a.tar", ({"__key__": f"{label:03d}", "npy": images[label], "cls": int(label)} for label in labels)
    )
    (folder / "a.tar.gz").write_bytes(gzip.compress((folder / "a.tar").read_bytes()))
    return {
        "text": (folder / "a.txt", readers.text_lines, int),
        "text, packed": (folder / "a.txt.gz", readers.text_lines, int),
        "idx": (pair, readers.idx, lambda example: int(example[1])),
        "npy": (folder / "a.npy", readers.npy, int),
        "npz": (folder / "a.npz", readers.npz, lambda example: int(example["label"])),
        "npz, packed": (folder / "packed.npz", readers.npz, lambda example: int(example["label"])),
        "parquet": (
            folder / "a.parquet",
            functools.partial(readers.parquet, batch_rows=3),
            lambda example: int(example["label"]),
        ),
        "tar": (folder / "a.tar", readers.tar, lambda example: example["cls"]),
        "tar, packed": (folder / "a.tar.gz", readers.tar, lambda example: example["cls"]),
        "own, with start": (11, range_from, int),
        "own, without": (11, range, int),
    }


def range_from(stop, start=0):
    yield from range(start, stop)


KINDS = [
    "text",
    "text, packed",
    "idx",
    "npy",
    "npz",
    "npz, packed",
    "parquet",
    "tar",
    "tar, packed",
    "own, with start",
    "own, without",
]


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_from_any_position(tmp_path, kind):
    file, reader, number = shards(tmp_path)[kind]
    reader = pickle.loads(pickle.dumps(reader))
    for start in range(12):
        assert [number(example) for example in readers.read_from(reader, file, start)] == list(range(start, 11))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own, with start"])
def test_a_file_that_became_shorter_is_an_error(tmp_path, kind):
    file, reader, _ = shards(tmp_path)[kind]
    with pytest.raises(DataLossError, match="has 11 examples, but reading was to go on after 12"):
        list(readers.read_from(reader, file, 12))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "own" not in kind])
def test_a_negative_position_is_an_error(tmp_path, kind):
    file, reader, _ = shards(tmp_path)[kind]
    with pytest.raises(InvalidArgumentError, match="start must be 0 or more"):
        list(reader(file, start=-1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "own" not in kind])
def test_a_missing_file_is_an_error(tmp_path, kind):
    file, reader, _ = shards(tmp_path)[kind]
    missing = tuple(path.with_name("no-" + path.name) for path in file) if isinstance(file, tuple) else None
    missing = missing or file.with_name("no-" + file.name)
    with pytest.raises(NotFoundError, match=r"There is no file .*no-\w+"):
        list(reader(missing))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "own" not in kind])
def test_no_path_is_an_error(kind, tmp_path):
    _, reader, _ = shards(tmp_path)[kind]
    with pytest.raises(TypeError, match=r"ts\.data\.readers\.\w+ reads one file: expected its path\. Received: int 7"):
        list(reader(7))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "own" not in kind and kind not in ("text", "tar")])
def test_a_file_cut_off_anywhere_is_an_error(tmp_path, kind):
    """Never the end of the data: text without packing is the only format that can't tell."""
    file, reader, _ = shards(tmp_path)[kind]
    victim = file[0] if isinstance(file, tuple) else file
    content = victim.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 40)):
        victim.write_bytes(content[:length])
        with pytest.raises(
            DataLossError, match=f"{victim.name} is (damaged at or soon after example|no gzip file)"
        ) as caught:
            list(reader(file))
        assert str(caught.value).endswith(("format.", "packed."))


def test_a_tar_file_cut_off_anywhere_is_an_error(tmp_path):
    """Also between two members, where tarfile sees the end of the archive."""
    file = shards(tmp_path)["tar"][0]
    content = file.read_bytes()
    end = len(content.rstrip(b"\0"))
    for length in itertools.chain(range(0, end, 512), range(100, end, 1024)):
        file.write_bytes(content[:length])
        with pytest.raises(DataLossError, match=r"a\.tar is (damaged at or soon after example \d+|cut off)"):
            list(readers.tar(file))


def test_examples_before_the_damage_are_read(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(10))
    file.write_bytes(file.read_bytes()[:-20])
    examples = readers.npy(file)
    assert [int(example) for example in itertools.islice(examples, 7)] == list(range(7))
    with pytest.raises(DataLossError, match=r"damaged at or soon after example 7 .*: it ends within the array of 10"):
        next(examples)


def test_a_reading_that_the_system_refuses_is_no_end(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(OSError, match=r"folder\.txt"):
        list(readers.text_lines(tmp_path / "folder.txt"))


def test_an_input_error_while_reading_names_file_and_example():
    class Broken(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            raise OSError(5, "Input/output error")

    column = _Column("far/a.npy", "the array", io.BufferedReader(Broken()), np.dtype("f4"), (3,))
    with pytest.raises(OSError, match=r"Reading example 2 failed: Input/output error: 'far/a\.npy'") as caught:
        column.read(2)
    assert caught.value.errno == 5


def test_every_example_has_memory_of_its_own(tmp_path):
    """A view would keep, and send to other processes, the whole block that it was cut from."""
    for file, reader, _ in shards(tmp_path).values():
        for example in itertools.islice(readers.read_from(reader, file), 3):
            parts = example if isinstance(example, tuple) else example.values() if isinstance(example, dict) else []
            for part in parts:
                if isinstance(part, torch.Tensor):
                    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
                    part.zero_()


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if "own" not in kind), "own"])
def test_a_pipeline_goes_on_in_the_middle_of_a_file(tmp_path, kind):
    file, reader, number = (tmp_path / "a.txt", own_lines, int) if kind == "own" else shards(tmp_path)[kind]
    if kind == "own":
        shards(tmp_path)

    def make():
        examples = Dataset.from_files([file, file], reader)
        return examples.map(lambda *parts: number(parts if len(parts) > 1 else parts[0])).shuffle(4, seed=1).batch(3)

    expected = [batch.tolist() for batch in make()]
    assert sorted(itertools.chain(*expected)) == sorted(2 * list(range(11)))
    for num_read in range(len(expected) + 1):
        dataset = make()
        read = [batch.tolist() for batch in itertools.islice(dataset, num_read)]
        later = make()
        later.load_state_dict(dataset.state_dict())
        assert read + [batch.tolist() for batch in later] == expected


def own_lines(path):
    with open(path) as file:
        return file.read().split()


# text


def test_text_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\n\n zwölf \nlast".encode())
    assert list(readers.text_lines(tmp_path / "a.txt")) == ["one", "", " zwölf ", "last"]
    assert list(readers.text_lines(str(tmp_path / "a.txt"), start=3)) == ["last"]


def test_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b""))
    assert list(readers.text_lines(tmp_path / "a.txt")) == list(readers.text_lines(tmp_path / "a.txt.gz")) == []


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(DataLossError, match=r"Line 1 \(the first is 0\) of .*a\.txt is not UTF-8"):
        list(readers.text_lines(tmp_path / "a.txt"))


def test_a_name_that_promises_gzip(tmp_path):
    (tmp_path / "a.txt.gz").write_text("not packed")
    with pytest.raises(DataLossError, match=r"a\.txt\.gz is no gzip file: it begins with b'no'"):
        list(readers.text_lines(tmp_path / "a.txt.gz"))


# idx


@pytest.mark.parametrize("dtype", IDX_CODES)
def test_idx_dtypes(tmp_path, dtype):
    array = (np.arange(6).reshape(3, 2) * 7).astype(dtype)
    (file := tmp_path / "a-idx").write_bytes(idx_bytes(array))
    examples = torch.stack(list(readers.idx(file)))
    assert torch.equal(examples, torch.tensor(array))
    assert examples.dtype == torch.tensor(array).dtype


def test_idx_of_one_file_and_of_a_pair(tmp_path):
    images, labels = images_and_labels(3)
    files = (
        write_idx(tmp_path / "images.gz", images),
        write_idx(tmp_path / "labels", labels.astype("u1")),
    )
    examples = list(readers.idx(files))
    assert all(isinstance(example, tuple) for example in examples)
    assert torch.equal(torch.stack([image for image, _ in examples]), torch.tensor(images))
    assert [int(label) for _, label in examples] == labels.tolist()
    assert torch.equal(torch.stack(list(readers.idx(files[0]))), torch.tensor(images))


def test_idx_of_unequal_length(tmp_path):
    files = (
        write_idx(tmp_path / "images", np.zeros((3, 2), "u1")),
        write_idx(tmp_path / "labels", np.zeros(4, "u1")),
    )
    with pytest.raises(InvalidArgumentError, match=r"don't belong together: .* 3 in .*images, 4 in .*labels\. Choose"):
        list(readers.idx(files))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_with_more_than_its_header_tells(tmp_path, suffix):
    content = idx_bytes(np.zeros(3, "u1")) + b"\0"
    (file := tmp_path / f"a{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataLossError, match="goes on after the 3 rows that the header"):
        list(readers.idx(file))


def test_no_idx(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(DataLossError, match=r"a\.png is no idx file: it begins with b'.x89PNG'"):
        list(readers.idx(tmp_path / "a.png"))


def test_idx_without_examples(tmp_path):
    assert list(readers.idx(write_idx(tmp_path / "a", np.zeros((0, 28, 28), "u1")))) == []


# npy and npz


@pytest.mark.parametrize("dtype", ["bool", "u1", "i8", ">i4", "f2", "f4", ">f8", "c8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_dtypes_and_orders(tmp_path, dtype, order):
    array = np.asarray(np.arange(24).reshape(4, 3, 2) % 5, dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    expected = torch.tensor(array.astype(array.dtype.newbyteorder("=")))
    for start in (0, 2, 4):
        examples = list(readers.npy(tmp_path / "a.npy", start=start))
        assert len(examples) == 4 - start
        assert all(map(torch.equal, examples, expected[start:]))
        assert all(example.dtype == expected.dtype for example in examples)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_npy_without_elements(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape))
    assert [example.shape for example in readers.npy(tmp_path / "a.npy")] == [torch.Size(shape[1:])] * shape[0]


def test_npy_of_strings(tmp_path):
    np.save(tmp_path / "a.npy", np.array(["one", "zwölf"]))
    np.save(tmp_path / "b.npy", np.array([[b"a", b"bc"]]))
    assert list(readers.npy(tmp_path / "a.npy")) == ["one", "zwölf"]
    assert list(readers.npy(tmp_path / "b.npy")) == [[b"a", b"bc"]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(3.0), "the array of .* is a scalar"),
        (np.array(["a", None], object), "has dtype object"),
        (np.array(["2020-01-01"], "M8[D]"), "has dtype datetime64"),
        (np.zeros(2, [("x", "f4"), ("y", "i4")]), "has dtype .*'x'"),
    ],
)
def test_npy_of_something_else(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(InvalidArgumentError, match=message):
        list(readers.npy(tmp_path / "a.npy"))


def test_two_arrays_in_one_npy_file(tmp_path):
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, np.zeros(2))
        np.save(file, np.zeros(2))
    with pytest.raises(DataLossError, match="goes on after the 2 rows"):
        list(readers.npy(tmp_path / "a.npy"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    images, labels = images_and_labels(5)
    save(tmp_path / "a.npz", image=np.asfortranarray(images), label=labels, name=np.array(list("abcde")), made_in=2020)
    reader = functools.partial(readers.npz, keys=["label", "image", "name"])
    examples = list(reader(tmp_path / "a.npz", start=1))
    assert [list(example) for example in examples] == [["label", "image", "name"]] * 4
    assert torch.equal(torch.stack([example["image"] for example in examples]), torch.tensor(images[1:]))
    assert [int(example["label"]) for example in examples] == labels[1:].tolist()
    assert [example["name"] for example in examples] == list("bcde")


def test_npz_choices(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros((4, 2)), z=np.array(1.0))
    with pytest.raises(InvalidArgumentError, match=r"has no arrays \['w'\], only \['x', 'y', 'z'\]"):
        list(readers.npz(tmp_path / "a.npz", keys=["x", "w"]))
    with pytest.raises(InvalidArgumentError, match=r"array 'z' of .* is a scalar"):
        list(readers.npz(tmp_path / "a.npz"))
    with pytest.raises(InvalidArgumentError, match=r"3 in array 'x' of .*, 4 in array 'y' of"):
        list(readers.npz(tmp_path / "a.npz", keys=["x", "y"]))
    with pytest.raises(InvalidArgumentError, match="no arrays to read from"):
        list(readers.npz(tmp_path / "a.npz", keys=[]))
    with pytest.raises(TypeError, match=r"keys must be a list of names, such as \['x'\]"):
        list(readers.npz(tmp_path / "a.npz", keys="x"))
    assert len(list(readers.npz(tmp_path / "a.npz", keys=["x"]))) == 3


def test_npz_with_a_wrong_checksum(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(1000))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[4000] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataLossError, match=r"a\.npz is damaged at or soon after example .*CRC"):
        list(readers.npz(tmp_path / "a.npz"))


def test_zip_without_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    with pytest.raises(InvalidArgumentError, match=r"There are no arrays to read from .*, which has \[\]"):
        list(readers.npz(tmp_path / "a.npz"))


# parquet


def test_parquet_types(tmp_path):
    rows = [
        {"number": 1, "flag": True, "text": "a", "raw": b"x", "vector": [1.0, 2.0], "ragged": [1], "tree": {"b": [1]}},
        {"number": None, "flag": False, "text": None, "raw": b"", "vector": None, "ragged": [], "tree": {"b": []}},
        {"number": 3, "flag": True, "text": "c", "raw": b"z", "vector": [5.0, 6.0], "ragged": [2, 3], "tree": None},
    ]
    schema = pyarrow.schema(
        [
            ("number", pyarrow.int32()),
            ("flag", pyarrow.bool_()),
            ("text", pyarrow.string()),
            ("raw", pyarrow.binary()),
            ("vector", pyarrow.list_(pyarrow.float32(), 2)),
            ("ragged", pyarrow.list_(pyarrow.int64())),
            ("tree", pyarrow.struct([("b", pyarrow.list_(pyarrow.int8()))])),
        ]
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    if int(pyarrow.__version__.partition(".")[0]) < 26:  # the newest for Python 3.10 is
        with pytest.raises(UnimplementedError, match="which pyarrow reads from 26 on"):
            list(readers.parquet(tmp_path / "a.parquet"))
        rows[1]["vector"] = [3.0, 4.0]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    for batch_rows in (1, 2, 256):
        examples = list(readers.parquet(tmp_path / "a.parquet", batch_rows=batch_rows))
        assert [example["text"] for example in examples] == ["a", None, "c"]
        assert [example["raw"] for example in examples] == [b"x", b"", b"z"]
        assert [example["tree"] for example in examples] == [{"b": [1]}, {"b": []}, None]
        assert torch.equal(examples[2]["number"], torch.tensor(3, dtype=torch.int32))
        assert examples[1]["number"] is None
        assert (examples[1]["vector"] is None) == (rows[1]["vector"] is None)
        assert examples[0]["flag"].dtype == torch.bool
        assert torch.equal(examples[2]["vector"], torch.tensor([5.0, 6.0]))
        assert [example["ragged"].tolist() for example in examples] == [[1], [], [2, 3]]


def test_parquet_of_tensors(tmp_path):
    images = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(images)
    pyarrow.parquet.write_table(pyarrow.table({"image": column}), tmp_path / "a.parquet")
    examples = [example["image"] for example in readers.parquet(tmp_path / "a.parquet", start=1, batch_rows=2)]
    assert torch.equal(torch.stack(examples), torch.tensor(images[1:]))


def test_parquet_choices(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"x": [1], "y": ["a"]}), tmp_path / "a.parquet")
    assert [list(example) for example in readers.parquet(tmp_path / "a.parquet", columns=["y"])] == [["y"]]
    assert [list(example) for example in readers.parquet(tmp_path / "a.parquet", columns=["y", "x"])] == [["y", "x"]]
    with pytest.raises(InvalidArgumentError, match=r"a\.parquet has no columns \['z'\], only \['x', 'y'\]"):
        list(readers.parquet(tmp_path / "a.parquet", columns=["x", "z"]))
    with pytest.raises(TypeError, match=r"columns must be a list of names, such as \['x'\]"):
        list(readers.parquet(tmp_path / "a.parquet", columns="x"))
    with pytest.raises(InvalidArgumentError, match="no columns to read from"):
        list(readers.parquet(tmp_path / "a.parquet", columns=[]))
    with pytest.raises(InvalidArgumentError, match=r"batch_rows must be positive.* Received: 0"):
        list(readers.parquet(tmp_path / "a.parquet", batch_rows=0))


def test_parquet_without_rows(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.array([], pyarrow.int8())}), tmp_path / "a.parquet")
    assert list(readers.parquet(tmp_path / "a.parquet")) == []


def test_parquet_damaged_in_the_middle(tmp_path):
    rng = np.random.default_rng(0)
    table = pyarrow.table({"x": rng.standard_normal(4000)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(2).column(0)
    offset = middle.dictionary_page_offset or middle.data_page_offset
    content[offset : offset + 40] = bytes(range(200, 240))
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataLossError, match=r"damaged at or soon after example (1|2)\d{3} \(the first is 0\)"):
        list(readers.parquet(tmp_path / "a.parquet"))


# tar


def test_tar_parts(tmp_path):
    sample = {"txt": "one", "json": {"a": [1]}, "cls": 3, "npy": np.arange(3), "bin": b"\0", "seg.txt": "two"}
    write_tar(tmp_path / "a.tar", [{"__key__": "folder/0", **sample}])
    (example,) = readers.tar(tmp_path / "a.tar")
    assert torch.equal(example.pop("npy"), torch.arange(3))
    del sample["npy"]
    assert example == {"__key__": "folder/0", **sample}


def test_tar_does_not_unpickle(tmp_path):
    content = pickle.dumps({"harmless": True})
    write_tar(tmp_path / "a.tar", [{"__key__": "0", "pyd": content}])
    assert list(readers.tar(tmp_path / "a.tar")) == [{"__key__": "0", "pyd": content}]


def test_tar_decoder(tmp_path):
    write_tar(
        tmp_path / "a.tar", [{"__key__": str(number), "raw": bytes([number]), "cls": number} for number in (1, 2)]
    )
    calls = []

    def decoder(extension, data):
        calls.append(extension)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if extension == ".raw" else None

    reader = functools.partial(readers.tar, decoder=decoder)
    (example,) = reader(tmp_path / "a.tar", start=1)
    assert example["raw"].tolist() == [2]
    assert example["cls"] == 2
    assert sorted(calls) == [".cls", ".raw"], "what is skipped is not decoded"


def test_tar_with_wrong_decoders(tmp_path):
    write_tar(tmp_path / "a.tar", [{"__key__": "0", "cls": 1}, {"__key__": "1", "json": b"{"}])
    with pytest.raises(ValueError, match="Unknown imagespec: photo"):
        list(readers.tar(tmp_path / "a.tar", decoder="photo"))
    with pytest.raises(TypeError, match="decoder must be the name of a kind of image"):
        list(readers.tar(tmp_path / "a.tar", decoder=3))
    with pytest.raises(DataLossError, match=r"Part 'json' of example 1 \(the first is 0\) of .*a\.tar, '1', can't be"):
        list(readers.tar(tmp_path / "a.tar"))


def test_tar_without_members(tmp_path):
    tarfile.open(tmp_path / "a.tar", "w").close()
    assert list(readers.tar(tmp_path / "a.tar")) == []


def test_tar_of_no_bytes_or_something_else(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / "b.tar").write_bytes(b"no archive" * 1000)
    for name in ("a.tar", "b.tar"):
        with pytest.raises(DataLossError, match=f"{name} is damaged at or soon after example 0"):
            list(readers.tar(tmp_path / name))


def test_tar_with_a_part_twice(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.cls", "0.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"1"))
    with pytest.raises(DataLossError, match=r"a\.tar is damaged at or soon after example 0 .*duplicate file name"):
        list(readers.tar(tmp_path / "a.tar"))


def test_two_archives_in_one_file(tmp_path):
    one = write_tar(tmp_path / "a.tar", [{"__key__": "0", "cls": 1}]).read_bytes()
    (tmp_path / "a.tar").write_bytes(one + bytes(20480) + one)
    with pytest.raises(DataLossError, match="has members after the end of the archive"):
        list(readers.tar(tmp_path / "a.tar"))


def test_a_pipe_is_no_file(tmp_path):
    with pytest.raises(NotFoundError, match="There is no file pipe:touch"):
        list(readers.tar(f"pipe:touch {tmp_path}/made"))
    assert not (tmp_path / "made").exists()


# all


@pytest.mark.parametrize(("reader", "package"), [(readers.parquet, "pyarrow"), (readers.tar, "webdataset")])
def test_missing_package(tmp_path, monkeypatch, reader, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"readers\.\w+ needs {package}: pip install 'pyarrow>="):
        list(reader(tmp_path / "a"))


@pytest.mark.parametrize("returned", [None, 3])
def test_a_reader_that_gives_nothing_to_iterate(returned):
    def forgot_yield(path):
        return returned

    with pytest.raises(TypeError, match=r"must return an iterable .*forgot_yield returned (NoneType|int) for 'a'"):
        readers.read_from(forgot_yield, "a")


def test_a_reader_of_python_objects(tmp_path):
    """A loaded list, a callable object and a C function are readers too."""

    class Reader:
        def __call__(self, path, start=0):
            return [path] * (3 - start)

    assert list(readers.read_from(Reader(), "a", 2)) == ["a"]
    assert list(readers.read_from(list, "abc", 2)) == ["c"]
    assert list(readers.read_from(max, ["ab", "cd"], 1)) == ["d"]


@pytest.mark.slow
def test_memory_does_not_hold_the_file(tmp_path):
    """Half of 80 MB is read with little more than buffers in use."""
    array = np.zeros((20_000, 1000), np.float32)
    array[:, 0] = np.arange(20_000)
    np.savez(tmp_path / "a.npz", x=array)
    np.savez_compressed(tmp_path / "b.npz", x=array)
    tracemalloc.start()
    try:
        for name in ("a.npz", "b.npz"):
            last = next(itertools.islice(readers.npz(tmp_path / name), 10_000, None))
            assert last["x"][0] == 10_000
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
