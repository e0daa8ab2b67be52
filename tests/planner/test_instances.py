"""Cloud offers: what is rented out for how much, and plans that are paid by them."""

import json

import pytest

from planner.api import estimate, plan
from planner.catalog.devices import get_device, list_devices
from planner.catalog.instances import get_instance, list_instances, offers_for, price_of
from planner.errors import BadRequestError, UnknownInstanceError
from planner.specs.estimate import EstimateRequest, PlanAnswer, PlanRequest
from tests.planner.asking import LLAMA_8B, SERVE, ask, document

EIGHT_H100 = "aws/p5.48xlarge"
ONE_H100 = "nebius/gpu-h100-sxm_1gpu-16vcpu-200gb"


def test_there_are_three_hundred_offers_of_many_providers():
    offers = list_instances()

    assert len(offers) >= 300
    assert len({offer.provider for offer in offers}) >= 20
    assert len({offer.id for offer in offers}) == len(offers)


@pytest.mark.parametrize("offer", list_instances(), ids=lambda offer: offer.id)
def test_every_offer_has_a_price_a_day_a_source_and_a_device_that_is_known(offer):
    assert offer.price_usd_per_hour == pytest.approx(
        offer.price_usd_per_device_hour * offer.devices
    )
    assert offer.as_of.startswith("20")
    assert offer.source
    assert offer.device is None or get_device(offer.device).id == offer.device


def test_an_offer_is_found_by_its_type_alone_and_in_any_case():
    assert get_instance("P5.48xlarge").id == EIGHT_H100
    assert get_instance(EIGHT_H100).devices == 8


def test_an_unknown_offer_is_refused_with_the_nearest():
    with pytest.raises(UnknownInstanceError, match=r"nearest: .*aws/p5.48xlarge") as caught:
        get_instance("aws/p5.48xlarg")

    assert caught.value.field == "cluster.instance"


def test_offers_of_a_device_come_cheapest_first_and_firm_unless_asked():
    firm = [offer.price_usd_per_device_hour for offer in offers_for("h100-sxm5-80gb")]
    every = offers_for("h100-sxm5-80gb", spot=True)

    assert firm == sorted(firm)
    assert len(every) > len(firm)
    assert not any(offer.is_spot for offer in offers_for("h100-sxm5-80gb"))


@pytest.mark.parametrize("device", [d for d in list_devices() if d.price_usd_per_hour])
def test_a_devices_price_lies_among_its_offers(device):
    prices = [offer.price_usd_per_device_hour for offer in offers_for(device.id)]

    assert min(prices) <= device.price_usd_per_hour <= max(prices) + 1e-6
    assert device.price_source == price_of(device.id)["price_source"]


def test_a_device_that_is_only_auctioned_has_no_price():
    only_spot = {o.device for o in list_instances() if o.is_spot and o.device} - {
        o.device for o in list_instances() if not o.is_spot
    }

    assert only_spot
    assert all(get_device(name).price_usd_per_hour is None for name in only_spot)


def test_a_cluster_may_be_nothing_but_an_offer():
    found = ask(cluster=EIGHT_H100, engine="vllm")
    same = ask(devices=8, device="h100-sxm5-80gb", engine="vllm")

    assert found.performance == same.performance
    assert found.memory == same.memory


def test_the_cost_is_the_offers_price_and_names_it():
    found = ask(cluster=ONE_H100, engine="vllm")
    offer = get_instance(ONE_H100)
    rate = found.performance.tokens_per_second
    term = next(term for term in found.terms if term.name == "Cost per million tokens")

    assert found.cost_usd_per_million_tokens == pytest.approx(
        offer.price_usd_per_hour / 3600 / rate * 1e6
    )
    assert offer.id in term.source
    assert offer.as_of in term.source


def test_all_devices_of_an_offer_are_paid_for_used_or_not():
    strategy = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    whole = ask(cluster=EIGHT_H100, engine="vllm", strategy=strategy)
    term = next(term for term in whole.terms if term.name == "Cost per million tokens")

    assert {i.symbol: i.value for i in term.inputs}["n"] == 8


def test_several_nodes_of_an_offer_are_several_machines():
    request = EstimateRequest.model_validate(
        document(cluster={"instance": EIGHT_H100, "nodes": 2}, engine="vllm")
    )

    strategy = estimate(request).strategy

    assert strategy.data_parallel_size * strategy.tensor_parallel_size == 16


def test_an_offer_of_a_card_that_the_catalog_lacks_says_so():
    unknown = next(offer.id for offer in list_instances() if offer.device is None)

    with pytest.raises(BadRequestError, match="the device catalog does not have"):
        ask(cluster=unknown)


def test_hardware_is_chosen_among_offers_by_cost():
    names = [EIGHT_H100, ONE_H100, "runpod/l4-community"]
    answer = plan(
        PlanRequest.model_validate(
            document(
                cluster=names[0],
                hardware_options=names,
                objective="cost",
                engine="vllm",
                workload={**SERVE, "concurrency": 64},
            )
        )
    )
    costs = {p.cluster.instance: p.cost_usd_per_million_tokens for p in reversed(answer.plans)}

    assert answer.plans[0].cluster.instance == min(costs, key=costs.get)
    assert answer.plans[0].cluster.device == get_device("h100").id


def test_a_plan_on_an_offer_can_be_sent_back_as_json():
    request = PlanRequest.model_validate(document(cluster=ONE_H100, engine="vllm"))
    answer = PlanAnswer.model_validate_json(plan(request).model_dump_json())
    again = estimate(
        EstimateRequest(
            model=LLAMA_8B,
            cluster=answer.plans[0].cluster,
            workload=request.workload,
            strategy=answer.plans[0].strategy,
            engine="vllm",
        )
    )

    assert again.cost_usd_per_million_tokens == answer.plans[0].cost_usd_per_million_tokens


def test_a_cluster_without_device_or_offer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"cluster\.device"):
        PlanRequest.model_validate(json.loads(json.dumps(document(cluster={"nodes": 2}))))
