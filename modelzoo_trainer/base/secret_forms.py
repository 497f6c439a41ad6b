"""Forms of secrets that those who issue them, or collections of such forms, document.

A secret is hidden where it begins and ends a word. A form must be distinct: digests, numbers of
commits and UUIDs are none, so keys of services that look like these are found by their names only.
The collections come from gitleaks (config/gitleaks.toml) and detect-secrets, and the lists of
partners of GitHub's secret scanning.
"""

from __future__ import annotations

import re
from typing import Final

_MIXED: Final = r"(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*[0-9])"
"""Before letters and digits that are not words."""
_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

_OF_MODELS: Final = (  # services of machine learning
    r"sk-(?:ant-|proj-|svcacct-|admin-)[\w-]{20,}|sk-or-v1-[0-9a-f]{64}|sk-[A-Za-z0-9]{20,}",
    rf"[sp]k-lf-{_UUID}|csk-[a-z0-9]{{40,}}|gsk_[A-Za-z0-9]{{40,}}|r8_[A-Za-z0-9]{{37,}}",
    r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{34}|pplx-[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{60,}",
    r"nvapi-[\w-]{40,}|tgp_v1_[\w-]{30,}|tvly-[\w-]{20,}|jina_[A-Za-z0-9]{40,}",
    rf"pa-{_MIXED}[\w-]{{40,}}|lsv2_[a-z]{{2}}_[0-9a-f]{{32}}_[0-9a-f]{{10}}|pcsk_\w{{50,}}",
    rf"fw_(?=\w*[0-9])[A-Za-z0-9]{{22,}}|sk_[0-9a-f]{{48}}|a[ks]-{_MIXED}[A-Za-z0-9]{{22}}",
    r"rpa_[A-Z0-9]{40,}|esecret_[A-Za-z0-9]{20,}|KGAT_[0-9a-f]{32}|wandb_v1_\w{20,}",
    r"eyJhcGlf[\w+/-]{20,}={0,2}|pylf_v[0-9]_[a-z]{2}_[A-Za-z0-9]{40,}",
)
_OF_CLOUDS: Final = (
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}|ABSK[A-Za-z0-9+/]{100,}={0,2}",
    r"AIza[\w-]{35}|GOCSPX-[\w-]{28}|ya29\.[\w.-]{20,}|1//0[\w-]{40,}|LTAI[A-Za-z0-9]{16,24}",
    r"AKID[A-Za-z0-9]{32}|AQVN[\w-]{35,38}|YC[\w-]{38}|t1\.[\w-]+={0,2}\.[\w-]{86}={0,2}",
    r"do[opr]_v1_[0-9a-f]{64}|dapi[0-9a-f]{32}(?:-[0-9])?|v1\.0-[0-9a-f]{24}-[0-9a-f]{146}",
    r"fo1_[\w-]{43}|fm(?:1[ar]|2)_[A-Za-z0-9+/]{40,}={0,3}|HRKU-[\w-]{36,}|nfp_[A-Za-z0-9]{36}",
    r"rnd_(?=\w*[0-9])[A-Za-z0-9]{28,}|sbp_[0-9a-f]{40}|sb_secret_[\w-]{20,}|4b1d[A-Za-z0-9]{38}",
    r"pscale_(?:tkn|oauth|pw)_[\w=.-]{32,}|napi_[a-z0-9]{60,}|tk-us-[\w-]{48}",
    r"tskey-[a-z]+-\w+-\w{10,}|sha256~[\w-]{43}",
)
_OF_SECRETS: Final = (  # stores of secrets, and keys of encryption
    rf"hv[bsr]\.[\w-]{{20,}}|s\.{_MIXED}[A-Za-z0-9]{{24}}|dp\.[a-z]+\.[\w.-]{{40,}}",
    r"AGE-(?:SECRET-KEY|PLUGIN-[A-Z0-9]+)-(?:PQ-)?1[0-9A-Z]{20,}|ops_eyJ[\w+/-]{40,}={0,3}",
    r"A3-[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}|pul-[0-9a-f]{40}|dnkey-[\w=-]{26}-[\w=-]{52}",
)
_OF_CODE: Final = (  # hosts of code and packages, and what builds them
    r"gh[opsur]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|gl(?:pat|s?oat|[df]t|rtr?|cbt|ptt|agent|imt|ffct|wt)-[\w.-]{20,}|GR1348941[\w-]{20}",
    r"ATBB[A-Za-z0-9]{32}|AT(?:ATT|CTT)3[\w=-]{60,}|CCIP(?:AT|RJ)_[A-Za-z0-9]{22}_[0-9a-f]{40}",
    r"bk[a-z]{2}_[0-9a-f]{40}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|rubygems_[0-9a-f]{48}",
    r"cio(?=\w*[0-9])[A-Za-z0-9]{32}|CLOJARS_[0-9a-z]{60}|dckr_[a-z]{3}_[\w-]{20,}",
    r"oy2(?=\w*[0-9])[a-z0-9]{43}|AKCp[A-Za-z0-9]{60,}|cmVmd[A-Za-z0-9]{50,}",
    r"sgp_(?:(?:[0-9a-f]{16}|local)_)?[0-9a-f]{40}|PMAK-[0-9a-f]{24}-[0-9a-f]{34}",
    r"sq[pua]_[0-9a-f]{40}|API-(?=\w*[0-9])[A-Z0-9]{26}|p8e-[a-z0-9]{32}",
    r"pn[ub]_(?=\w*[0-9])[A-Za-z0-9]{36}|rdme_[a-z0-9]{70}",
    rf"pat\.{_MIXED}[\w-]{{22}}\.\w{{24}}\.\w{{20}}|(?:sdk|api|mob)-{_UUID}",
)
_OF_MESSAGES: Final = (  # chats, mail and documents
    r"xox[a-z](?:\.xox[bp])?-[\w-]{10,}|xapp-[\w-]{10,}|[0-9]{5,16}:A[\w-]{34}|SK[0-9a-f]{32}",
    rf"[MNO]{_MIXED}[A-Za-z0-9_-]{{23,}}\.[\w-]{{6}}\.[\w-]{{27,}}|SG\.[\w-]{{16,}}\.[\w-]{{16,}}",
    r"key-[0-9a-f]{32}|[0-9a-f]{32}-us[0-9]{1,2}|xkeysib-[0-9a-f]{64}-[A-Za-z0-9]{16}",
    r"lin_(?:api|oauth)_[A-Za-z0-9]{40,}|ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43}",
    rf"pat[A-Za-z0-9]{{14}}\.[0-9a-f]{{64}}|figd_[\w-]{{40,}}|pat-[a-z]{{2}}[0-9]-{_UUID}",
    r"tfp_[\w.=-]{50,}|sl\.[\w=-]{100,}|CFPAT-[\w-]{43}|fio-u-[\w=-]{64}",
)
_OF_PAYMENTS: Final = (
    r"[rs]k_(?:live|test|prod)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/]{24,}={0,2}",
    r"shp(?:at|ca|pa|ss)_[0-9A-Fa-f]{32}|sq0(?:atp|csp)-[\w-]{22,}|EAAA(?=[\w-]*[0-9])[\w-]{56,}",
    rf"access-(?:sandbox|development|production)-{_UUID}|rzp_(?:live|test)_[A-Za-z0-9]{{14}}",
    r"shippo_(?:live|test)_[0-9A-Fa-f]{40}|EZ[AT]K[A-Za-z0-9]{54}|FLWSECK(?:_TEST)?-\w{12,}(?:-X)?",
    r"duffel_(?:live|test)_[\w=-]{43}|(?:live|test)_[0-9a-f]{35}|EAA[CM][A-Za-z0-9]{100,}",
    r"A{22}(?=\w*%)[A-Za-z0-9%]{60,}",
)
_OF_MONITORS: Final = (
    r"NR(?:AK|II|JS|RA)-[\w-]{19,}|gl(?:c|sa)_[\w+/=]{32,}|dt0[a-z][0-9]{2}\.[A-Z0-9]{24}\.\w{64}",
    r"sntry[su]_[\w+/=-]{40,}|phx_[A-Za-z0-9]{40,}|\w{6}_\w{29}_mmk|sm_[aps]at_[A-Za-z0-9]{16}",
)
_OF_ANY: Final = (r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",)  # a JSON Web Token

ISSUED: Final = re.compile(
    r"(?<![\w-])(?:"
    + "|".join(
        (
            *(*_OF_MODELS, *_OF_CLOUDS, *_OF_SECRETS, *_OF_CODE),
            *(*_OF_MESSAGES, *_OF_PAYMENTS, *_OF_MONITORS, *_OF_ANY),
        )
    )
    + r")(?![\w-])",
    re.ASCII,
)
"""Tokens and keys that stand for themselves."""
OF_AZURE: Final = re.compile(
    r"(?<![\w~.-])[\w~.]{3}[0-9]Q~[\w~.-]{31,34}(?![\w~-])"
    r"|(?<!\w)[A-Za-z0-9+/]{52}(?:JQQJ99|AzSearch|ACDb|\+AMC)[A-Za-z0-9+/]{4,30}={0,2}(?![\w=])",
    re.ASCII,
)
"""Begin with any letter, so they are searched for by themselves."""
PRIVATE_KEY: Final = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key")
DIGEST: Final = re.compile(  # of a password, as in /etc/shadow and htpasswd
    r"\$(?:2[aby]\$[0-9]{2}\$[./A-Za-z0-9]{53}|(?:apr1|argon2id?|[156y]|7)\$[^\s:]{20,})"
)
WEBHOOK: Final = re.compile(
    r"(?P<name>https://(?:hooks\.slack\.com/[a-z]+/"
    r"|(?:\w+\.)?discord(?:app)?\.com/api/(?:v[0-9]+/)?webhooks/"
    r"|[\w-]+\.webhook\.office\.com/|outlook\.office(?:365)?\.com/webhook/"
    r"|hooks\.zapier\.com/hooks/|api\.telegram\.org/bot(?=[0-9])|hc-ping\.com/"
    r"|maker\.ifttt\.com/trigger/|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook/"
    r"|[\w.-]+/hooks/(?=[a-z0-9]{26}\b)))[^\s\"']+"
)
LINES: Final = (  # of files and commands: the value after a name
    re.compile(  # netrc
        r"(?P<name>(?:^|(?<=\s))(?:machine\s+(?:\S*[.:]\S*|\S+(?=\s+login))|default(?=\s+login))"
        r"(?:\s+(?:login|account)\s+\S+)*\s+password\s+)(?P<value>\S+)"
    ),
    re.compile(  # pgpass
        r"(?P<name>(?:^|(?<=\s))[\w.*-]+:(?:[0-9]{4,5}|\*):[\w.*-]+:[\w.*-]+:)(?P<value>\S+)"
    ),
    re.compile(r"(?P<name>:_(?:authToken|auth|password)\s*=\s*)(?P<value>\S+)"),  # npmrc
    re.compile(r"(?P<name>\bsshpass\s+-p\s*)(?P<value>\S+)"),
    re.compile(  # a user and a password
        r"(?P<name>\b(?:curl|wget|http)\b[^\n]{0,400}?\s(?:-u|--user)[ =][\"']?[^\s:\"']+:)"
        r"(?P<value>[^\s\"']+)"
    ),
    re.compile(  # without an underscore before the word that says so
        r"(?P<name>(?<![\w$-])(?:[A-Z0-9]+(?:PASSWORD|PASSWD|PASSPHRASE|APIKEY|SECRET)|SSHPASS)=)"
        r"(?P<value>\"[^\"]*\"|'[^']*'|[^;,\s]+)"
    ),
)
