from lab.attachment import sglangs_scheduler
from lab.modelled_device.attach import UPSTREAM
from lab.upstream.comparison import differences, parameters_of


def test_sglang_has_what_the_modelled_device_goes_around():
    assert [text for names in UPSTREAM for text in differences(names)] == []
    run_batch = sglangs_scheduler().run_batch
    assert parameters_of(run_batch) == "self, batch, pp_proxy_tensors="
