"""Made-up secrets of many kinds, put together from parts: no scanner takes this file for a leak."""

from __future__ import annotations

import random
import re
import string
from base64 import b64encode

_LETTERS = {
    "h": "0123456789abcdef",
    "H": "0123456789ABCDEF",
    "d": string.digits,
    "l": string.ascii_lowercase + string.digits,
    "U": string.ascii_uppercase + string.digits,
    "a": string.ascii_letters + string.digits,
    "L": string.ascii_letters,
}
_UUID = "{h8}-{h4}-{h4}-{h4}-{h12}"
_FORMS = """
Anthropic sk-ant-api03-{a93}AA
OpenAI project sk-proj-{a74}T3BlbkFJ{a74}
OpenAI service account sk-svcacct-{a58}T3BlbkFJ{a58}
OpenAI admin sk-admin-{a58}T3BlbkFJ{a58}
OpenAI sk-{a48}
OpenRouter sk-or-v1-{h64}
Langfuse sk-lf-UUID
Cerebras csk-{l48}
Groq gsk_{a52}
Replicate r8_{a37}
Hugging Face hf_{a34}
Hugging Face organization api_org_{L34}
Perplexity pplx-{a48}
xAI xai-{a80}
NVIDIA nvapi-{a64}
Together tgp_v1_{a43}
Tavily tvly-{a32}
Jina jina_{a60}
Voyage pa-{a43}
LangSmith lsv2_pt_{h32}_{h10}
Pinecone pcsk_{a5}_{a63}
Fireworks fw_{a24}
ElevenLabs sk_{h48}
Modal ak-{a22}
RunPod rpa_{U46}
Anyscale esecret_{l26}
Kaggle KGAT_{h32}
Neptune eyJhcGlfYWRkcmVzcyI6{a60}
Logfire pylf_v1_us_{a44}
AWS AKIA{U16}
AWS session ASIA{U16}
AWS Bedrock ABSK{a128}=
Google AIza{a35}
Google OAuth client GOCSPX-{a28}
Google OAuth access ya29.{a60}
Google OAuth refresh 1//0{a60}
Alibaba LTAI{a20}
Tencent AKID{a32}
Yandex AQVN{a36}
Yandex IAM t1.{a40}.{a86}
Azure client abc8Q~{a34}
Azure storage {a52}JQQJ99{a26}
DigitalOcean dop_v1_{h64}
DigitalOcean OAuth doo_v1_{h64}
DigitalOcean refresh dor_v1_{h64}
Databricks dapi{h32}-2
Cloudflare origin v1.0-{h24}-{h146}
Fly.io fo1_{a43}
Fly.io macaroon fm2_{a120}
Heroku HRKU-{a60}
Netlify nfp_{a36}
Render rnd_{a28}
Supabase sbp_{h40}
Supabase secret sb_secret_{a32}
ClickHouse 4b1d{a38}
PlanetScale pscale_tkn_{a43}
PlanetScale password pscale_pw_{a43}
Neon napi_{l64}
Scalingo tk-us-{a48}
Tailscale tskey-auth-{a12}-{a32}
OpenShift sha256~{a43}
Vault service hvs.{a95}
Vault batch hvb.{a140}
Vault legacy s.{a24}
Doppler dp.pt.{a43}
age AGE-SECRET-KEY-1{U58}
1Password A3-{U6}-{U6}-{U5}-{U5}-{U5}-{U5}
1Password service ops_eyJ{a260}
Terraform Cloud {a14}.atlasv1.{a67}
Pulumi pul-{h40}
Defined Networking dnkey-{l26}-{l52}
GitHub ghp_{a36}
GitHub OAuth gho_{a36}
GitHub Actions ghs_{a36}
GitHub fine-grained github_pat_{a22}_{a59}
GitLab glpat-{a20}
GitLab deploy gldt-{a20}
GitLab runner glrt-{a20}
GitLab routable glpat-{a27}.{l9}
Bitbucket ATBB{a32}
Atlassian ATATT3{a186}
CircleCI CCIPAT_{a22}_{h40}
Buildkite bkua_{h40}
npm npm_{a36}
PyPI pypi-AgEIcHlwaS5vcmc{a80}
RubyGems rubygems_{h48}
crates.io cio{a32}
Clojars CLOJARS_{l60}
Docker Hub dckr_pat_{a27}
NuGet oy2{l43}
Artifactory AKCp{a69}
Artifactory reference cmVmd{a59}
Sourcegraph sgp_{h16}_{h40}
Postman PMAK-{h24}-{h34}
SonarQube squ_{h40}
Octopus API-{U26}
Adobe p8e-{l32}
Prefect pnu_{a36}
ReadMe rdme_{l70}
Harness pat.{a22}.{a24}.{a20}
LaunchDarkly sdk-UUID
Slack bot xoxb-{d12}-{d12}-{a24}
Slack app xapp-1-{U11}-{d13}-{h64}
Slack refresh xoxe-1-{a146}
Telegram {d10}:A{a34}
Twilio SK{h32}
Discord bot M{a25}.{a6}.{a38}
SendGrid SG.{a22}.{a43}
Mailgun key-{h32}
Mailchimp {h32}-us12
Brevo xkeysib-{h64}-{a16}
Linear lin_api_{a40}
Notion ntn_{d11}{a35}
Notion legacy secret_{a43}
Airtable pat{a14}.{h64}
Figma figd_{a40}
HubSpot pat-na1-UUID
Typeform tfp_{a59}
Dropbox sl.{a135}
Contentful CFPAT-{a43}
Frame.io fio-u-{a64}
Stripe sk_live_{a24}
Stripe restricted rk_test_{a24}
Stripe webhook whsec_{a32}
Shopify shpat_{h32}
Square sq0atp-{a22}
Square access EAAA{a60}
Plaid access-sandbox-UUID
Razorpay rzp_live_{a14}
Shippo shippo_live_{h40}
EasyPost EZAK{a54}
Flutterwave FLWSECK_TEST-{h32}-X
Duffel duffel_test_{a43}
Lob live_{h35}
Facebook EAAC{a120}
New Relic NRAK-{U27}
Grafana service glsa_{a32}_{h8}
Grafana cloud glc_{a60}
Dynatrace dt0c01.{U24}.{U64}
Sentry sntryu_{h64}
PostHog phx_{a43}
MaxMind {a6}_{a29}_mmk
SettleMint sm_pat_{a16}
JSON Web Token eyJ{a30}.eyJ{a60}.{a43}
bcrypt $2b$12${a53}
crypt $6${a8}${a86}
"""


def _filled(name: str, form: str) -> str:
    drawn = random.Random(name)  # a secret without each kind of letter is unlikely, not impossible

    def text(found: re.Match[str]) -> str:
        letters, num = _LETTERS[found[1]], int(found[2])
        return "".join(drawn.choice(letters) for _ in range(num))

    return re.sub(r"\{(\w)([0-9]+)\}", text, form.replace("UUID", _UUID))


KINDS = {
    name: _filled(name, form)
    for name, _, form in (line.rpartition(" ") for line in _FORMS.strip().splitlines())
}
"""A secret of each kind that stands for itself, by its name."""
_BODY = _filled("body", "{a20}")
IN_TEXTS = {
    "netrc": f"machine example.org login me password {_BODY}",
    "netrc of several lines": f"machine git.local\n  login me\n  password {_BODY}\n",
    "netrc default": f"default login me password {_BODY}",
    "pgpass": f"db.local:5432:data:me:{_BODY}",
    "npmrc": f"//registry.npmjs.org/:_authToken={_BODY}",
    "PGPASSWORD": f"PGPASSWORD={_BODY} psql -h db",
    "MYSQL_PWD": f"MYSQL_PWD={_BODY} mysql",
    "SSHPASS": f"SSHPASS={_BODY}",
    "REDISCLI_AUTH": f"REDISCLI_AUTH={_BODY}",
    "sshpass": f"sshpass -p {_BODY} ssh me@host",
    "curl": f"curl -s -u me:{_BODY} https://h/a",
    "Docker": f'{{"ghcr.io": {{"auth": "{b64encode(f"me:{_BODY}".encode()).decode()}"}}}}',
    "Vault header": f"X-Vault-Token: {_BODY}",
    "GitLab header": f"PRIVATE-TOKEN: {_BODY}",
    "Bearer": f"Authorization: Bearer {_BODY}",
    "login": f"postgresql://me:{_BODY}@db/data",
    "Redis": f"redis://:{_BODY}@cache:6379/0",
    "Sentry DSN": f"https://{_BODY}@o1.ingest.sentry.io/2",
    "signed URL": f"https://h/a?X-Amz-Signature={_BODY}",
    "Azure connection": f"Endpoint=sb://a.b/;SharedAccessKeyName=r;SharedAccessKey={_BODY}=",
    "ODBC": f"Driver=x;UID=sa;PWD={_BODY}",
    "Discord webhook": f"https://discord.com/api/v10/webhooks/123/{_BODY}",
    "Mattermost webhook": f"https://chat.local/hooks/{_filled('hook', '{l26}')}",
    "IFTTT webhook": f"https://maker.ifttt.com/trigger/x/with/key/{_BODY}",
    "PGP": f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{_BODY}",
    "OpenSSH": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{_BODY}",
}
"""Texts with a secret in them, by its kind."""
ORDINARY = [
    *("/data/runs/2026-01-01/checkpoint_1000", "s3://bucket/path/to/data.tar.gz", "C:\\runs\\a"),
    *("meta-llama/Llama-3.1-8B-Instruct", "openai/whisper-large-v3", "sk-learn-regression-base-2"),
    *("model.layers.10.self_attn.q_proj.weight", "key_value_projection", "token_type_embeddings"),
    *("glue-mnli-roberta-base-finetuned-epoch3", "pa-resnet50-cifar10-seed1-lr001-batch128-run2"),
    *(
        "machine learning with a password",
        "default password policy",
        "a.b:1234:c:d",
        "a.b:12:c:d:e",
        "12:30:45",
    ),
    *("dGVzdA==", "aGVsbG8gd29ybGQ=", "A" * 100, "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQ", "s.d.t"),
    *("-----BEGIN PUBLIC KEY-----", "checkpoint-1000-of-2000-shard-00001", "r8_resnet", "hf_hub"),
    *(
        "gsk_scheduler",
        "dop_v1_short",
        "hvs.example",
        "api-gateway-service-1",
        "$HOME/data",
        "$1.50",
    ),
    *("#1f77b4", "0x7f3a2b", "1e-4", "2026-11-28T23:18:42Z", "v1.0-rc2", "torch==2.10.0", "-100"),
    *("PASSWORD={password}", "PGPASSWORD=$PGPASSWORD", "docker run --user 1000:1000 image"),
    *("https://example.org/hooks/install", "https://github.com/org/repo/blob/main/a.py#L10-L20"),
    *("live_metrics", "test_accuracy", "EAAA", "pat.weight", "secret_santa", "xai-explanations"),
    *(_filled("sha1", "{h40}"), _filled("sha256", "{h64}"), _filled("md5", "{h32}")),
    *(_filled("uuid", _UUID), _filled("short sha", "{h8}"), f"sha256:{_filled('image', '{h64}')}"),
    *(f"git+https://github.com/a/b@{_filled('commit', '{h40}')}", f"run-{_filled('run', '{l8}')}"),
]
"""Texts without a secret."""
BODY = _BODY
"""The secret in most of `IN_TEXTS`."""
