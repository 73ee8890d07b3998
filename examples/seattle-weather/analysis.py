"""Seattle's weather: `python analysis.py seattle-weather.csv` writes out/weather.png and out/values.json."""

import json
import os
import sys

import matplotlib.pyplot as plt
import pandas as pd

out = os.environ.get("CPUOS_OUT", "out")
os.makedirs(out, exist_ok=True)

days = pd.read_csv(sys.argv[1], parse_dates=["date"])
by_month = days.groupby(days["date"].dt.month)
rain = by_month["precipitation"].sum() / days["date"].dt.year.nunique()
warmest = days.loc[days["temp_max"].idxmax()]

values = {
    "days": len(days),
    "first_day": str(days["date"].min().date()),
    "last_day": str(days["date"].max().date()),
    "mean_temp_max_c": round(float(days["temp_max"].mean()), 2),
    "warmest_day": str(warmest["date"].date()),
    "warmest_c": float(warmest["temp_max"]),
    "rainy_days_percent": round(100 * float((days["precipitation"] > 0).mean()), 1),
    "wettest_month": int(rain.idxmax()),
}

figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), constrained_layout=True)
monthly = days.set_index("date")[["temp_min", "temp_max"]].resample("MS").mean()
top.fill_between(monthly.index, monthly["temp_min"], monthly["temp_max"], color="tab:orange", alpha=0.4)
top.set_title("Seattle: mean daily temperature range by month")
top.set_ylabel("°C")
bottom.bar(rain.index, rain, color="tab:blue")
bottom.set_title("Mean precipitation by month of the year")
bottom.set_ylabel("mm")
bottom.set_xticks(range(1, 13))
figure.savefig(os.path.join(out, "weather.png"), dpi=120)

with open(os.path.join(out, "values.json"), "w") as file:
    json.dump(values, file, indent=2)
print(json.dumps(values))
