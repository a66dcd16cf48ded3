"""Settings of phone calls."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from sglang_live.errors import BadInputError
from sglang_live.settings import Settings, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class TelephonyConfig(Settings):
    telephony_token: str = flag(
        "",
        "secret of the phone service: Twilio and SignalWire sign with it, others send it",
        value="TEXT",
        env="SGLANG_LIVE_TELEPHONY_TOKEN",
        unset="phone calls need an API key; without any there are none",
    )
    telephony_url: str = flag(
        "",
        "address of this server as the phone service has it and signs it, such as "
        "wss://voice.example",
        value="URL",
        unset="that of the request",
    )
    telephony_keys_as_text: bool = flag(
        False, "tell the model in writing which keys a user presses, and let it respond"
    )

    def check(self) -> None:
        if self.telephony_url:
            url = urlsplit(self.telephony_url)
            if url.scheme not in ("ws", "wss") or not url.netloc or url.query or url.fragment:
                raise BadInputError(
                    f"--telephony-url: {self.telephony_url!r} is no address such as "
                    "wss://voice.example"
                )
