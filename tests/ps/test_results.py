import collections
import enum
import json
import math
import urllib.error

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.ps.results import decode_error, decode_result, decode_side, encode_error, encode_result
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message, decode, encode


def over_the_wire(message):
    return decode([bytes(frame) for frame in encode(message)], Limits())


def returned(value):
    return decode_result(over_the_wire(encode_result(value)))


class Color(enum.IntEnum):
    RED = 3


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -5, 2**63, -(2**80), 1.5, -0.0, 1e300, 5e-324, math.inf, -math.inf),
        *("", "text", "\ud800", "é\n\0", b"", b"\x00\xff", 1 + 2j, complex(math.inf, -0.0)),
        *([], (), {}, [None, [1, (2.0,)]], {"a": 1, 2: "b", (1, "c"): None, None: True, 1.5: b"x"}),
    ],
)
def test_plain_values_come_back(value):
    result = returned(value)
    assert result == value
    assert type(result) is type(value)
    assert repr(result) == repr(value)  # tells -0.0 from 0.0


def test_integers_that_python_does_not_print():
    assert returned(10**5000) == 10**5000


def test_not_a_number():
    assert math.isnan(returned([math.nan])[0])


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Point(1, 2), (1, 2)),
        (torch.Size([2, 3]), (2, 3)),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter("aa"), {"a": 2}),
        (Color.RED, 3),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
    ],
)
def test_subclasses_become_plain(value, plain):
    assert returned(value) == plain
    assert type(returned(value)) is type(plain)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_come_back(dtype, shape):
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    result = returned({"t": value})["t"]
    assert (result.dtype, result.shape) == (dtype, value.shape)
    assert bytes(result.flatten().view(torch.uint8).numpy()) == bytes(value.flatten().view(torch.uint8).numpy())


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, 3)[:, ::2],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
)
def test_tensors_of_all_kinds_are_plain_when_they_arrive(value):
    result = returned(value)
    assert type(result) is torch.Tensor
    assert not result.requires_grad
    assert torch.equal(result, value.detach().resolve_conj().resolve_neg())
    result += 1


def test_a_result_is_a_copy():
    model = torch.nn.Linear(2, 2)
    array = np.zeros(3)
    message = encode_result([model.weight, array])
    with torch.no_grad():
        model.weight.fill_(7.0)
    array += 1
    weight, array = decode_result(over_the_wire(message))
    assert not weight.eq(7.0).any()
    assert array.tolist() == [0, 0, 0]


def test_a_view_of_much_is_not_all_of_it():
    (tensor,) = encode_result(torch.zeros(1000, 1000)[0, :3]).tensors
    assert tensor.untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6.0)[::-2],
        np.asfortranarray(np.ones((2, 3), np.float32)),
        np.zeros((0, 2), np.int8),
        np.array(5.0),
        np.array([1, 2], ">i4"),
        np.array([True, False]),
        np.array([1j]),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_arrays_come_back(value):
    value.flags.writeable = False
    result = returned([value])[0]
    assert isinstance(result, np.ndarray)
    assert (result.dtype, result.shape) == (value.dtype.newbyteorder("="), value.shape)
    assert np.array_equal(result, value)


@pytest.mark.parametrize("value", [np.float32(1.5), np.float64(1.5), np.int64(-3), np.bool_(True), np.complex64(1j)])
def test_numbers_of_numpy_come_back(value):
    result = returned((value,))[0]
    assert type(result) is type(value)
    assert result == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"Received a set as result\. Return sorted\(value\)"),
        ({"a": [0, object()]}, r"Received an object as result\['a'\]\[1\]"),
        (torch.nn.Linear(1, 1), "Received a torch.nn.modules.linear.Linear as result"),
        (lambda: 0, "Received a function"),
        (iter([]), "list_iterator"),
        ((i for i in range(2)), r"a generator as result. Return list\(value\)"),
        (torch.eye(2).to_sparse(), r"torch.sparse_coo as result. Return its to_dense\(\)"),
        (torch.ones(2, device="meta"), "on the meta device"),
        (np.array(["a"]), r"of dtype <U1 as result. Return numbers, or its tolist\(\)"),
        (np.array([object()]), "of dtype object"),
        (np.datetime64("2020-01-01"), "numpy.datetime64 of dtype"),
        ({torch.ones(()): 1}, r"a torch.Tensor in a dictionary's key"),
        (torch.float32, "torch.dtype"),
        (ts.PerReplica([1, 2]), "experimental_local_results"),
        (ValueError("x"), "a ValueError"),
    ],
)
def test_what_is_not_allowed_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        encode_result(value)


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_quantized_tensors_are_not_allowed():
    with pytest.raises(TypeError, match=r"quantized as result\. Return its dequantize"):
        encode_result(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_containers_that_contain_themselves():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="contain themselves"):
        encode_result(value)
    deep = 1
    for _ in range(100):
        deep = [deep]
    assert returned(deep) == deep


@pytest.mark.parametrize(
    "tree",
    [
        *([], {}, {"tensor": 0}, {"tensor": -1}, {"tensor": "0"}, {"list": 3}, {"list": [{"array": 5}]}, {"eval": "1"}),
        *({"int": "1", "float": "1"}, {"bytes": "*"}, {"int": "z"}, {"dict": [[1]]}, {"dict": [[{"list": []}, 1]]}),
        *({"complex": ["a", 1]}, {"complex": []}, {"number": None}),
    ],
    ids=json.dumps,
)
def test_damaged_results_are_refused(tree):
    with pytest.raises(ValueError, match="can't be read"):
        decode_result(Message("done", {}, (), (json.dumps(tree).encode(),)))


@pytest.mark.parametrize("blobs", [(), (b"", b"{}"), (b"{",), (b"\xff",), (b"[" * 100_000,)], ids=lambda b: str(b)[:10])
def test_damaged_json_is_refused(blobs):
    with pytest.raises(ValueError, match="can't be read"):
        decode_result(Message("done", {}, (), blobs))


def test_what_is_beside_the_result():
    message = over_the_wire(encode_result([torch.ones(2)], {"metric": (3, torch.zeros(1))}))
    assert decode_result(message)[0].tolist() == [1, 1]
    assert decode_side(message) == {"metric": (3, torch.zeros(1))}
    assert decode_side(encode_result(1)) is None
    with pytest.raises(ValueError, match="can't be read"):
        decode_side(Message("done", {}, (), (b"1", b"1", b"1")))


# Errors


class MyError(Exception):
    pass


class NoRowsError(KeyError):
    pass


class NeedsTwoError(ts.errors.UnavailableError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raised(error):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - whatever the case raises
        return decode_error(json.loads(json.dumps(encode_error(caught))))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        KeyError("key"),
        IndexError(),
        FileNotFoundError(2, "No such file", "x"),
        ZeroDivisionError("division by zero"),
        NotImplementedError("x"),
        ts.errors.OutOfRangeError("End of sequence"),
        ts.errors.InvalidArgumentError("x"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.linalg.LinAlgError("singular"),
    ],
    ids=repr,
)
def test_known_errors_keep_class_and_text(error):
    result = raised(error)
    assert type(result) is type(error)
    assert str(result) == str(error)


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (MyError("oh"), RuntimeError, "MyError: oh"),
        (NoRowsError("r"), KeyError, "'NoRowsError: r'"),
        (NeedsTwoError("a", "b"), ts.errors.UnavailableError, "NeedsTwoError: a and b"),
        (
            UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
            UnicodeError,
            "UnicodeDecodeError: 'utf-8' codec can't decode ",
        ),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
        (urllib.error.URLError("down"), OSError, "URLError: <urlopen error down>"),
        (Unprintable(), RuntimeError, "Unprintable: <its message can't be made: RuntimeError>"),
        (UserWarning("w"), RuntimeError, "UserWarning: w"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_errors_become_the_nearest_known_class(error, cls, text):
    result = raised(error)
    assert type(result) is cls
    assert str(result).startswith(text)


def test_an_error_brings_its_traceback():
    def in_the_closure():
        raise MyError("oh")

    try:
        in_the_closure()
    except MyError as error:
        result = decode_error(encode_error(error))
    text = "\n".join(getattr(result, "__notes__", [str(result.__cause__)]))
    assert "in in_the_closure" in text
    assert "MyError: oh" in text


def test_long_texts_are_shortened():
    fields = encode_error(ValueError("x" * 10**6 + "end"))
    assert len(json.dumps(fields)) < 100_000
    assert str(decode_error(fields)).endswith("end")
    assert "characters left out" in str(decode_error(fields))


@pytest.mark.parametrize("fields", [{}, {"type": "Error"}, {"type": "", "message": "", "traceback": "", "bases": 3}])
def test_damaged_errors_are_refused(fields):
    with pytest.raises(ValueError, match="can't be read"):
        decode_error(fields)


def test_an_error_can_not_name_any_class():
    result = decode_error({"type": "subprocess.Popen", "bases": ["object"], "message": "ls", "traceback": ""})
    assert type(result) is RuntimeError
