"""The loss tables that the distributed-training guides print."""

import pytest

from tests.programs import cpu_devices, guide_losses

# fmt: off
TABLES = {
    2024: [
        1.0082505, 1.0002, 0.9922241, 0.9843224, 0.97649455, 0.96874, 0.96105826, 0.9534487, 0.9459112, 0.9384451,
        0.9310499, 0.92372507, 0.91647035, 0.909285, 0.90216863, 0.8951206, 0.8881406, 0.8812279, 0.8743823, 0.867603,
        0.8608897, 0.8542416, 0.8476584, 0.8411393, 0.8346843, 0.82829237, 0.8219633, 0.8156963, 0.80949104, 0.80334705,
        0.79726344, 0.79124004, 0.7852762, 0.7793713, 0.773525, 0.7677367, 0.7620057, 0.75633174, 0.75071406,
        0.74515235, 0.739646, 0.73419434, 0.7287971, 0.7234536, 0.7181633, 0.71292585, 0.70774055, 0.7026069, 0.6975246,
        0.69249296, 0.6875115, 0.6825797, 0.6776972, 0.6728633, 0.6680777, 0.6633398, 0.6586491, 0.65400517, 0.6494075,
        0.6448556,
    ],
    2021: [
        0.29786447, 0.29653987, 0.29522538, 0.29392087, 0.29262626, 0.29134142, 0.29006627, 0.28880078, 0.2875447,
        0.28629807, 0.28506076, 0.2838327, 0.28261372, 0.28140378, 0.28020284, 0.27901068, 0.27782732, 0.27665266,
        0.2754866, 0.274329, 0.2731799, 0.27203918, 0.27090666, 0.26978233, 0.26866615, 0.26755798, 0.2664578,
        0.26536545, 0.2642809, 0.26320407,
    ],
}
# fmt: on


@pytest.mark.parametrize("version", TABLES)
@pytest.mark.parametrize("devices", [[], *map(cpu_devices, (1, 2, 4))], ids=["default", "1", "2", "4"])
def test_in_one_process(version, devices):
    assert guide_losses(devices, version) == pytest.approx(TABLES[version], abs=1e-6)


@pytest.mark.parametrize("version", TABLES)
@pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["2 processes", "2 processes x 2 replicas"])
def test_in_two_processes(version, devices, process_pool):
    for losses in process_pool(2).run(guide_losses, devices, version):
        assert losses == pytest.approx(TABLES[version], abs=1e-6)
