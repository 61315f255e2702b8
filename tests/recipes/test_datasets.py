import functools
import gzip
import hashlib
import http.server
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

DEBIAN_PATH = Path("/usr/share/datasets/fashion-mnist")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(values: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.ndim)) + sizes + values.tobytes()


@pytest.fixture
def contents():
    """The unpacked bytes of a data set of five training and three test images, 4 pixels wide and high."""
    train, test = np.arange(5 * 16, dtype=np.uint8), np.arange(3 * 16, dtype=np.uint8)
    arrays = (train.reshape(5, 4, 4), train[:5] % 3, test.reshape(3, 4, 4), test[:3])
    return dict(zip(FILES, map(idx_bytes, arrays), strict=True))


@pytest.fixture
def folder(tmp_path, contents):
    path = tmp_path / "given"
    path.mkdir()
    for name, content in contents.items():
        (path / f"{name}.gz").write_bytes(gzip.compress(content))
    return path


@pytest.fixture
def load(tmp_path, contents):
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    cache = tmp_path / "cache"
    return functools.partial(
        datasets.load_idx,
        name="Tiny",
        root=None,
        folders=[],
        cache=str(cache),
        url="http://127.0.0.1:1",
        sha256=digests,
    )


@pytest.fixture
def served(folder):
    """The address of a server of this machine that offers the folder, and the paths that were asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_slice_is_balanced():
    train, test = datasets.load_slice()
    for dataset, per_class in ((train, 600), (test, 100)):
        images, labels = dataset.tensors
        assert images.shape == (10 * per_class, 1, 28, 28)
        assert images.dtype == torch.float32
        assert (images.min(), images.max()) == (0, 1)
        assert labels.dtype == torch.int64
        assert labels.bincount().tolist() == [per_class] * 10


@pytest.mark.skipif(not DEBIAN_PATH.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_slice_is_the_first_of_each_class():
    with np.load(datasets.SLICE_PATH) as arrays:
        for part, prefix, num_per_class in (("train", "train", 600), ("test", "t10k", 100)):
            content = [gzip.decompress((DEBIAN_PATH / f"{name}.gz").read_bytes()) for name in FILES if prefix in name]
            images = np.frombuffer(content[0], np.uint8, offset=16).reshape(-1, 28, 28)
            labels = np.frombuffer(content[1], np.uint8, offset=8)
            expected = datasets.first_per_class(images, labels, num_per_class)
            np.testing.assert_array_equal(arrays[f"{part}_images"], expected[0])
            np.testing.assert_array_equal(arrays[f"{part}_labels"], expected[1])


def test_first_per_class_keeps_the_order():
    labels = np.array([1, 0, 1, 1, 0, 0])
    images = np.arange(6)
    assert datasets.first_per_class(images, labels, 2)[0].tolist() == [0, 1, 2, 4]


def test_missing_and_damaged_slice(tmp_path):
    path = tmp_path / "slice.npz"
    with pytest.raises(FileNotFoundError, match=r"slice\.npz is missing\. Restore it with `git checkout"):
        datasets.load_slice(path)
    content = bytearray(datasets.SLICE_PATH.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"slice\.npz is damaged: its SHA-256 .* Restore it with `git checkout"):
        datasets.load_slice(path)


@pytest.mark.parametrize("packed", [True, False])
def test_given_folder(load, folder, contents, packed):
    if not packed:
        for name, content in contents.items():
            (folder / f"{name}.gz").unlink()
            (folder / name).write_bytes(content)
    train, test = load(root=str(folder))
    assert train.tensors[0].shape == (5, 1, 4, 4)
    torch.testing.assert_close(train.tensors[0][1, 0, 0], torch.arange(16.0, 20.0) / 255)
    assert train.tensors[1].tolist() == [0, 1, 2, 0, 1]
    assert test.tensors[1].tolist() == [0, 1, 2]


def test_installed_folder_is_found(load, folder, tmp_path):
    train, _ = load(folders=[str(tmp_path / "elsewhere"), str(folder)])
    assert len(train) == 5


def test_given_folder_lacks_a_file(load, folder):
    (folder / f"{FILES[3]}.gz").unlink()
    with pytest.raises(FileNotFoundError, match=rf"data\.root=.* lacks {FILES[3]} .*Give another folder, or leave"):
        load(root=str(folder))


def test_download_is_kept(load, served, tmp_path):
    url, asked = served
    assert len(load(url=url)[0]) == 5
    assert asked == [f"/{name}.gz" for name in FILES]
    assert len(load(url=url)[0]) == 5
    assert len(asked) == 4, "the second time the files come from the cache"
    assert {path.name for path in (tmp_path / "cache").glob("*")} == {".lock", *(f"{name}.gz" for name in FILES)}


def test_download_with_wrong_checksum_is_not_kept(load, served, folder, contents, tmp_path):
    other = bytearray(contents[FILES[0]])
    other[-1] ^= 1
    (folder / f"{FILES[0]}.gz").write_bytes(gzip.compress(other))
    with pytest.raises(ValueError, match="have SHA-256"):
        load(url=served[0])
    assert not list((tmp_path / "cache").glob("*ubyte*"))


@pytest.mark.parametrize("gone", [True, False])
def test_failed_download_says_what_to_do(load, served, folder, gone):
    (folder / f"{FILES[0]}.gz").unlink()
    url = served[0] if gone else "http://127.0.0.1:1"
    with pytest.raises(FileNotFoundError, match=r"can't be downloaded .*pass data\.root=FOLDER.*apt install"):
        load(url=url)


def flip_a_bit_of_the_pixels(content):
    changed = bytearray(content)
    changed[-1] ^= 1
    return gzip.compress(changed)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: gzip.compress(content)[:-20], "unpacking failed"),
        (lambda content: b"<html>not found</html>", "unpacking failed"),
        (lambda content: gzip.compress(b"\x00\x00\x0d\x03" + content[4:]), "is no idx file of bytes"),
        (lambda content: gzip.compress(content[:-3]), "needs 96 bytes, not 93"),
        (flip_a_bit_of_the_pixels, "have SHA-256"),
    ],
    ids=["truncated", "not gzip", "magic", "short", "checksum"],
)
def test_damaged_file(load, folder, contents, damage, message):
    path = folder / f"{FILES[0]}.gz"
    path.write_bytes(damage(contents[FILES[0]]))
    with pytest.raises(ValueError, match=rf"{FILES[0]}\.gz .*{message}.* Delete it"):
        load(root=str(folder))


def test_images_and_labels_must_fit(load, folder, contents):
    path = folder / f"{FILES[1]}.gz"
    path.write_bytes(gzip.compress(contents[FILES[3]]))
    with pytest.raises(ValueError, match="5 images but 3 labels"):
        load(root=str(folder), sha256=dict.fromkeys(FILES))
