"""Offers and answers: what is left out, what is asked for, and the network outside."""

import asyncio
from types import SimpleNamespace

import pytest

from sglang_live.webrtc.host import Pace
from sglang_live.webrtc.network import Network, Turn
from sglang_live.webrtc.peer import (
    UnusableOfferError,
    asking_for_fec,
    check_offer,
    usable_part,
    with_address,
)

OFFER = "v=0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 111\r\nm=application 9 UDP/DTLS/SCTP webrtc-datachannel"
HOST = "a=candidate:1 1 udp 2130706431 192.0.2.7 40000 typ host"


def test_an_offer_has_one_audio_line_and_one_channel():
    check_offer(OFFER)
    for lines in ("v=0", OFFER + "\r\nm=video 9 X 1", OFFER.replace("m=audio", "m=video")):
        with pytest.raises(UnusableOfferError, match="one audio line"):
            check_offer(lines)


def test_other_codecs_candidates_of_other_networks_and_their_end_are_left_out():
    lines = [
        "v=0",
        "m=audio 9 UDP/TLS/RTP/SAVPF 0 111 9",
        *("a=rtpmap:0 PCMU/8000", "a=rtpmap:111 opus/48000/2", "a=fmtp:9 x", "a=rtcp-fb:111 nack"),
        HOST,
        "a=candidate:2 1 udp 1 0a1b.local 40000 typ host",
        "a=candidate:3 1 tcp 1 192.0.2.7 9 typ host tcptype active",
        "a=end-of-candidates",
        *[HOST] * 100,
    ]
    kept = usable_part("\r\n".join(lines)).split("\r\n")
    wanted = ["a=rtpmap:111 opus/48000/2", "a=rtcp-fb:111 nack"]
    assert kept[1:4] == ["m=audio 9 UDP/TLS/RTP/SAVPF 111", *wanted]
    assert kept[4:] == [*[HOST] * 30, ""]
    with pytest.raises(UnusableOfferError, match="lacks Opus"):
        usable_part("v=0\r\na=rtpmap:0 PCMU/8000")


def test_the_answer_asks_for_repetition_of_lost_packets():
    answer = asking_for_fec("a=rtpmap:111 opus/48000/2\r\na=rtpmap:0 PCMU/8000")
    assert answer.split("\r\n")[1] == "a=fmtp:111 minptime=10;useinbandfec=1"
    assert answer.count("useinbandfec") == 1


@pytest.mark.parametrize(
    ("client", "address"),
    [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8::1", "2001:db8::1")],
)
def test_a_relay_is_told_of_the_address_that_the_offer_came_from(client, address):
    lines = with_address(OFFER, client).split("\r\n")
    assert lines[2] == f"a=candidate:0 1 udp 1 {address} 9 typ host"
    assert [*lines[:2], *lines[3:]] == OFFER.split("\r\n")


@pytest.mark.parametrize("client", ["", "a proxy", "192.0.2.7:80"])
def test_what_is_no_address_is_not_told(client):
    assert with_address(OFFER, client) == OFFER


def test_a_relay_is_told_again_before_it_forgets():
    ice = SimpleNamespace(turn=SimpleNamespace(create_turn_endpoint=lambda **options: options))
    Network(turn=Turn("turn:relay.example", "u", "p")).apply(None, ice)
    assert ice.turn.create_turn_endpoint()["channel_refresh_time"] < 300


def test_behind_a_nat_the_answer_has_the_address_outside():
    network = Network(public_address="203.0.113.5")
    relayed = HOST.replace("host", "relay raddr 192.0.2.7 rport 9")
    seen = network.as_seen_from_outside(f"c=IN IP4 192.0.2.7\r\n{HOST}\r\n{relayed}\r\n")
    assert seen.split("\r\n")[:3] == [
        "c=IN IP4 203.0.113.5",
        HOST.replace("192.0.2.7", "203.0.113.5"),
        relayed,
    ]
    assert Network().as_seen_from_outside(HOST) == HOST


async def test_ports_are_of_the_range_and_when_all_are_taken_it_is_an_error():
    loop = asyncio.get_running_loop()
    probe, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
    )
    first = probe.get_extra_info("sockname")[1]
    create = loop.create_datagram_endpoint
    try:
        Network(ports=(first, first)).apply(loop, None)
        with pytest.raises(OSError, match="no UDP port"):
            await loop.create_datagram_endpoint(
                asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
            )
        probe.close()
        await asyncio.sleep(0.05)
        again, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
        )
        assert again.get_extra_info("sockname")[1] == first
        again.close()
    finally:
        loop.create_datagram_endpoint = create


def test_every_20_ms_come_also_when_the_process_was_stopped():
    pace, now_s, n_given = Pace(100.0), 100.0, 0
    for late_s in (0.0, 0.004, 0.3, 0.0, 2.5, 0.019, 0.0):
        now_s += pace.wait_s(now_s) + late_s
        n_given += 1 + pace.advance(now_s)
        assert n_given == pace.n
        assert now_s - 100.0 - 0.02 <= pace.n * 0.02 <= now_s - 100.0 + 1e-6
