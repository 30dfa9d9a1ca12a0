"""Nothing but public addresses is read, however the address is written."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stream2llm_sdk.errors import AddressNotAllowedError, ConfigurationError, FetchError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard

FORBIDDEN_URLS = [
    # schemes
    "file:///etc/passwd",
    "ftp://example.com/",
    "gopher://example.com/",
    "raw:<html>",
    "data:text/html,x",
    "javascript:alert(1)",
    "//example.com/",
    "example.com",
    "",
    # user names, which hide the host from people and from other parsers
    "http://example.com@127.0.0.1/",
    "http://user:password@example.com/",
    "http://@example.com/",
    # malformed
    "http://",
    "http:///path",
    "http://example.com:99999/",
    "http://example.com:0/",
    "http://[::1/",
    "http://exa mple.com/",
    "http://example.com\\@127.0.0.1/",
    "http://example.com\r\nHost: evil/",
    "http://example.com\t/",
    "http://exa\u00admple.com/",
    "http://127.0.0.1%2f.example.com/",
    # IPv4
    "http://127.0.0.1/",
    "http://127.0.0.1./",
    "http://127.255.255.254:8080/",
    "http://0.0.0.0/",
    "http://10.1.2.3/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://100.64.0.1/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://192.0.0.192/",
    "http://192.88.99.1/",
    "http://198.18.0.1/",
    "http://203.0.113.5/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    # other spellings of 127.0.0.1 and of public addresses
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://127.1/",
    "http://127.0.1/",
    "http://0/",
    "http://1.1.1.0x1/",
    "http://08.8.8.8/",
    "http://①②⑦.⓪.⓪.①/",
    "http://127。0。0。1/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://١٢٧.0.0.1/",
    # IPv6
    "http://[::]/",
    "http://[::1]/",
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[2606:4700::1%eth0]/",
    "http://[fd00:ec2::254]/",
    "http://[fec0::1]/",
    "http://[ff02::1]/",
    "http://[2001:db8::1]/",
    "http://[3fff::1]/",
    "http://[100::1]/",
    # IPv4 inside IPv6
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::ffff:169.254.169.254]/",
    "http://[::127.0.0.1]/",
    "http://[::8.8.8.8]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[64:ff9b::127.0.0.1]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[64:ff9b:1::8.8.8.8]/",
    "http://[2002:7f00:1::]/",
    "http://[2002:808:808::]/",
    "http://[2001:0:808:808::]/",
    "http://[::7f00:1]/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]/",
    "http://[::FFFF:a00:1]/",
    "http://[::ffff:0:0]/",
    "http://[64:ff9b::]/",
    "http://[64:ff9b::c0a8:101]/",
    "http://[64:ff9b:1::]/",
    "http://[64:ff9b:1:fffe::7f00:1]/",
    "http://[64:ff9b:1:7f00:0:100::]/",
    "http://[2002:a9fe:a9fe::1]/",
    "http://[2002:c0a8:101:0:0:5efe:7f00:1]/",
    "http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
    "http://[2606:4700::5efe:127.0.0.1]/",
    "http://[2606:4700::200:5efe:a00:1]/",
    "http://[2606:4700::5efe:8.8.8.8]/",
    "http://[fe80::5efe:127.0.0.1]/",
    # IPv6 in other places and spellings
    "http://[0:0:0:0:0:0:0:1]/",
    "http://[::1%lo]/",
    "http://[::1%25lo]/",
    "http://[fc00::1]/",
    "http://[ff0e::1]/",
    "http://[2001:10::1]/",
    "http://[2001:20::1]/",
    "http://[5f00::1]/",
    "http://[4000::1]/",
    "http://[v1.fe80::1]/",
    "http://[127.0.0.1]/",
    "http://[::1]evil.example/",
    "http://::1/",
    # IPv4 in other spellings
    "http://127.000.000.001/",
    "http://0x7F.0x0.0x0.0x1/",
    "http://0177.0.0.0x1/",
    "http://127.0x1/",
    "http://4294967295/",
    "http://00000000000000000000000177.1/",
    "http://0x/",
    "http://1.2.3.4.5/",
    "http://256.256.256.256/",
    "http://example.com.127/",
    "http://127.0.0.1:80:80/",
    "http://１２７。０。０。１/",
    "http://127.0.0.1\u3002/",
    "http://①②⑦.0.0.1:8080/",
    "http://%31%32%37.0.0.1/",
    "http://127.0.0.1#@example.com/",
    "http://127.0.0.1?@example.com/",
    "http://0300.0250.1.1/",
    "http://3232235777/",
    "http://0xA9FEA9FE/",
    "http://169.254.43518/",
    # ports of other protocols
    "http://example.com:22/",
    "http://example.com:25/",
    "http://example.com:110/",
    "https://example.com:143/",
    "http://example.com:587/",
    "http://example.com:2049/",
    "http://example.com:6000/",
    "http://example.com:6667/",
    "http://8.8.8.8:53/",
    "http://[2606:4700:4700::1111]:21/",
    "http://example.com:-80/",
    "http://example.com:80a/",
    "http://example.com:８０/",
]

ALLOWED_URLS = [
    "http://example.com",
    "https://example.com:8443/a?b=c#d",
    "HTTPS://EXAMPLE.COM./",
    "http://bücher.example/straße",
    "http://a_b.example.com/",
    "http://8.8.8.8/",
    "http://0x7f.example.com/",
    "http://example.com/a@b?c=http://127.0.0.1/",
    "http://[2606:4700:4700::1111]/",
    "http://[::ffff:8.8.8.8]/",
    "http://[64:ff9b::8.8.8.8]/",
    "http://[2606:4700::5eff:7f00:1]/",
    "http://example.com:80/",
    "http://example.com:8080/",
    "https://example.com:444/",
    "http://example.com:/",
]


def answering(*addresses: str) -> AddressGuard:
    async def lookup(host: str, port: int) -> Sequence[str]:
        return addresses

    return AddressGuard(["10.1.0.0/16"], lookup=lookup)


@pytest.mark.parametrize("url", FORBIDDEN_URLS)
def test_refuses(url: str) -> None:
    with pytest.raises(AddressNotAllowedError):
        AddressGuard().check_url(url)


@pytest.mark.parametrize("url", ALLOWED_URLS)
def test_takes(url: str) -> None:
    AddressGuard().check_url(url)


@pytest.mark.parametrize(
    ("network", "url"),
    [
        ("127.0.0.0/8", "http://127.0.0.1:8000/"),
        ("127.0.0.0/8", "http://[::ffff:127.0.0.1]/"),
        ("10.1.0.0/16", "http://[64:ff9b::10.1.2.3]/"),
        ("::1/128", "http://[::1]/"),
        ("fd00::/8", "http://[fd12::1]/"),
        ("64:ff9b:1::/48", "http://[64:ff9b:1::7f00:1]/"),
        ("2606:4700::/32", "http://[2606:4700::5efe:127.0.0.1]/"),
    ],
)
def test_named_network_is_allowed_and_no_other(network: str, url: str) -> None:
    guard = AddressGuard([network])
    guard.check_url(url)
    with pytest.raises(AddressNotAllowedError):
        guard.check_url("http://192.168.1.1/")
    with pytest.raises(AddressNotAllowedError):
        guard.check_url("http://2130706433/")


@pytest.mark.parametrize("networks", ["127.0.0.0/8", ["localhost"], ["127.0.0.1/8"], [""]])
def test_network_that_is_none_is_a_configuration_error(networks: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="allow_networks"):
        AddressGuard(networks)


@pytest.mark.parametrize(
    "answer",
    [
        *("127.0.0.1", "::1", "::ffff:10.0.0.1", "fe80::1%eth0", "64:ff9b::7f00:1", "junk", ""),
        *("64:ff9b:1::808:808", "2002:7f00:1::", "2001:0:7f00:1::", "::127.0.0.1", "2606:4700::5efe:7f00:1"),
    ],
)
async def test_name_that_leads_inside_is_refused(answer: str) -> None:
    with pytest.raises(AddressNotAllowedError, match=r"public\.example"):
        await answering(answer).resolve("public.example", 80)


async def test_only_allowed_answers_are_given_out_in_order() -> None:
    guard = answering("192.168.0.1", "8.8.4.4", "10.1.0.7", "8.8.4.4", "::1", "2606:4700::1")
    assert await guard.resolve("mixed.example", 80) == ["8.8.4.4", "10.1.0.7", "2606:4700::1"]


async def test_name_without_address_is_a_fetch_error() -> None:
    with pytest.raises(FetchError, match=r"nothing\.example"):
        await answering().resolve("nothing.example", 80)
    with pytest.raises(FetchError, match="cannot be resolved"):
        await AddressGuard().resolve("a" * 70 + ".example", 80)
